"""Reading a random Llama from a Hugging Face folder into parameters, compared with only reading the bytes, and with only
filling as much memory (interop/speed.py)."""

from xfresearch.benchmarks.flags import add_json, add_sizes, write_figures


def add_flags(parser) -> None:
    add_sizes(parser, {"width": 1024, "layers": 8, "vocab": 128_256, "rounds": 5})
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="of the files")
    add_json(parser)


def run(a) -> None:
    import tempfile
    from pathlib import Path

    from xfresearch.interop import speed

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "llama"
        speed.write_random(folder, speed.llama(a.width, a.layers, a.vocab), a.dtype)
        rows = speed.measure(folder, a.rounds)
    for row in rows:
        print(f"{row['what']:8}{row['seconds']:8.2f} s{row['MB/s']:8.0f} MB/s")
    write_figures(a, {"rows": rows})
