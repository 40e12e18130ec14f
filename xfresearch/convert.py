"""python -m xfresearch.convert import FOLDER WORKDIR
python -m xfresearch.convert export WORKDIR FOLDER

Converts a Hugging Face folder to a run's directory, and back. The folder has config.json, safetensors and a tokenizer.
evaluate, generate and xf.load read both. docs/interop.md lists what is exact and what is not supported.
"""

import re
import time
from argparse import ArgumentTypeError
from pathlib import Path

from xfresearch import command
from xfresearch.errors import UserError, require_new

EPILOG = """\
examples:
  python -m xfresearch.convert import models/pythia-70m runs/pythia --dtype float32
  python -m xfresearch.convert export runs/pythia models/copy
  python -m xfresearch.convert export runs/a models/a --family llama --dtype bfloat16 --shard-size 500MB"""

UNITS = {"": 1, "MB": 10**6, "GB": 10**9}


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    options.convert(options)


def parse(arguments: list[str]):
    parser = command.Parser(prog="python -m xfresearch.convert", description=__doc__, epilog=EPILOG)
    conversions = parser.add_subparsers(required=True, metavar="import|export")

    import_parser = conversions.add_parser("import", description=import_folder.__doc__)
    import_parser.add_argument("folder", metavar="FOLDER", help="a Hugging Face folder")
    import_parser.add_argument("workdir", metavar="WORKDIR", help="a new directory")
    dtypes = ("float32", "bfloat16", "float64")
    import_parser.add_argument(
        "--dtype", default="", choices=dtypes, help="dtype of computation (default: that of the files)"
    )
    import_parser.set_defaults(convert=import_folder)

    export_parser = conversions.add_parser("export", description=export_folder.__doc__)
    export_parser.add_argument("workdir", metavar="WORKDIR", help="a run's directory, or one of its checkpoints")
    export_parser.add_argument("folder", metavar="FOLDER", help="a new directory")
    add = export_parser.add_argument
    add("--family", default="", metavar="F", help="model_type to write (default: as imported, or the first that fits)")
    dtypes = ("float32", "bfloat16", "float16", "float64")
    add(
        "--dtype",
        default="",
        choices=dtypes,
        help="dtype of the files (default: as imported, or that of the parameters)",
    )
    add("--step", type=int, metavar="N", help="step of the checkpoint to export (default: the newest)")
    add("--shard-size", type=size, default="5GB", metavar="SIZE", help="largest size of a file (default: 5GB)")
    export_parser.set_defaults(convert=export_folder)
    return parser.parse_args(arguments)


def size(text: str) -> int:
    """The number of bytes in '500MB' or '5GB'."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(|MB|GB)", text)
    if not match or not (count := int(float(match[1]) * UNITS[match[2]])):
        raise ArgumentTypeError(f"{text} is not allowed: it must be a size like 500MB or 5GB")
    return count


def import_folder(options) -> None:
    """Imports a Hugging Face folder as a directory that evaluate, generate and xf.load read."""
    require_new(Path(options.workdir), "import")
    from xfresearch import loading
    from xfresearch.interop import llama2c
    from xfresearch.interop.folder import is_folder, stored_tensors

    folder, _ = loading.locate(options.folder)
    if not is_folder(folder):
        what = "a run's directory"
        if not folder.is_dir():
            llama2c.read_layout(Path(folder))  # raises an error that says what any other .bin file is
            what = "a llama2.c model, which evaluate, generate and xf.load read as it is"
        raise UserError(f"{folder} is {what}: it must be a Hugging Face folder")
    begin = time.perf_counter()
    lm = loading.load(folder, dtype=options.dtype)
    seconds = time.perf_counter() - begin
    lm.save(options.workdir)
    read = sum(tensor.bytes for tensor in stored_tensors(folder).values())
    print(f"{options.workdir}: {summary(lm.source.config['model_type'], lm, read, seconds)}")


def export_folder(options) -> None:
    """Exports the model of a run as a Hugging Face folder."""
    require_new(Path(options.folder), "export")
    from xfresearch import loading
    from xfresearch.interop.folder import stored_tensors

    lm = loading.load(options.workdir, options.step)
    begin = time.perf_counter()
    family = lm.export_hf(options.folder, options.family, options.dtype, options.shard_size)
    seconds = time.perf_counter() - begin
    written = sum(tensor.bytes for tensor in stored_tensors(Path(options.folder)).values())
    print(f"{options.folder}: {summary(family, lm, written, seconds)}")


def summary(family: str, lm, size: int, seconds: float) -> str:
    """The result in one line: family, parameters, bytes and speed."""
    import jax

    count = sum(leaf.size for leaf in jax.tree.leaves(lm.params))
    return f"{family}, {count:,} parameters, {size / 1e9:.2f} GB in {seconds:.1f} s ({size / seconds / 1e6:.0f} MB/s)"


if __name__ == "__main__":
    command.run(main)
