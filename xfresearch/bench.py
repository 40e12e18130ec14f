"""Compares the implementations of one hot operation, side by side in one process.

    python -m xfresearch.bench attention --memory 512
    python -m xfresearch.bench cross_entropy --vocab 32000 --rows 512,1024,4096
    python -m xfresearch.bench grouped_matmul --experts 8
    python -m xfresearch.bench import_hf --layers 16
    python -m xfresearch.bench decode runs/a runs/b
    python -m xfresearch.bench update configs/gpt2.py:3m configs/moe.py:3m

Every round calls each implementation once, so that a busy machine slows all of them equally. A figure is the fastest
round. The floor is the time that the operation's matrix products would take at the rate of one large product, which is
measured in the same run.

`import_hf` reads a random Llama from a Hugging Face folder. It compares this with only reading the bytes, and with
only filling as much memory (interop/speed.py).
"""

import time
from argparse import ArgumentTypeError

from xfresearch.command import Parser, run
from xfresearch.files import write_json
from xfresearch.held_out import at_least

FLOOR = "floor"
FLOOR_SIZE = 1536  # rows and columns of both matrices of the large product
SHOWN = 9  # operations of an update


def parse(arguments):
    parser = Parser(prog="python -m xfresearch.bench", description=__doc__)
    operations = parser.add_subparsers(
        dest="operation", required=True, metavar="attention|cross_entropy|grouped_matmul|import_hf|decode|update"
    )
    sizes = {
        "attention": {"batch": 16, "length": 256, "heads": 4, "kv-heads": 4, "head-size": 64, "memory": 0},
        "cross_entropy": {"tokens": 4096, "width": 256, "vocab": 8192},
        "grouped_matmul": {"tokens": 8192, "width": 256, "hidden": 512, "experts": 8},
    }
    for operation, defaults in sizes.items():
        command = operations.add_parser(operation, description=OPERATIONS[operation].__doc__)
        for name, default in defaults.items():
            kind = at_least(1 if default else 0)
            command.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=f"default {default}")
        if operation == "cross_entropy":
            command.add_argument(
                "--rows", default="512,1024,4096", metavar="N,N,...", help="the tile sizes to compare, in tokens"
            )
        command.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
        command.add_argument("--rounds", type=at_least(1), default=15, metavar="N", help="default 15")
        command.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    command = operations.add_parser("import_hf", description="Reading a Hugging Face folder from disk into parameters.")
    for name, default in {"width": 1024, "layers": 8, "vocab": 128_256, "rounds": 5}.items():
        command.add_argument(f"--{name}", type=at_least(1), default=default, metavar="N", help=f"default {default}")
    command.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="of the files")
    command.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    command = operations.add_parser("decode", description=bench_decode.__doc__)
    command.add_argument("workdirs", nargs="+", metavar="WORKDIR", help="a run's directory, a checkpoint or a folder")
    for name, default in {"batch": 1, "prompt": 16, "tokens": 64, "rounds": 15}.items():
        command.add_argument(f"--{name}", type=at_least(1), default=default, metavar="N", help=f"default {default}")
    command.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    command = operations.add_parser("update", description=bench_update.__doc__)
    command.add_argument("configs", nargs="+", metavar="FILE[:arg]", help="configs; --config.key=value changes all of them")
    command.add_argument("--rounds", type=at_least(1), default=15, metavar="N", help="default 15")
    command.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    together = "also update N runs of the first config in one program (jax.vmap); its figures are for one of them"
    command.add_argument("--together", type=at_least(1), default=1, metavar="N", help=together)
    command.add_argument("--by-operation", action="store_true", help="also the time of each operation of the first config")
    options, options.overrides = parser.parse_known_args(arguments)
    if options.overrides and options.operation != "update":
        parser.error(f"unrecognized arguments: {' '.join(options.overrides)}")
    return options


def bench_update(a) -> None:
    """Updates of training runs: time, training FLOPs per second, page faults, and tokens per second beside the first one."""
    import numpy as np

    from xfresearch.config.files import parse as read
    from xfresearch.config.resolving import with_vocabulary
    from xfresearch.data.tokenizers import vocab_size
    from xfresearch.models.closed_form import costs
    from xfresearch.training.timing import Timer, timed_rounds

    configs = {name: read(["--config", name, *a.overrides]) for name in a.configs}
    configs = {name: with_vocabulary(each, each.model.vocab_size or vocab_size(each.data)) for name, each in configs.items()}
    timed = [(name, config, 1) for name, config in configs.items()]
    if a.together > 1:
        name, config, _ = timed[0]
        timed.append((f"{name}, {a.together} runs in one program", config, a.together))
    runs_N1 = np.array([[runs] for _, _, runs in timed])
    tokens_N1 = np.array([[config.batch_size * config.sequence_length] for _, config, _ in timed])
    timers = [Timer(config, runs) for _, config, runs in timed]
    seconds_NR, faults_NR = timed_rounds(timers, a.rounds) / runs_N1
    rates_NR = tokens_N1 / seconds_NR
    rows = []
    for i, (name, config, _) in enumerate(timed):
        flops = float(costs(config.model, config.sequence_length).training_flops_per_token)
        row = {"config": name, "ms": 1e3 * seconds_NR[i].min(), "GFLOP/s": flops * rates_NR[i].max() / 1e9}
        row |= {"page faults": np.median(faults_NR[i]), "tokens/s": rates_NR[i].max()}
        rows.append(row | {"ratio": np.median(rates_NR[i] / rates_NR[0])})
    print(f"{'ms':>10}{'GFLOP/s':>10}{'page faults':>13}{'tokens/s':>12}{'ratio':>8}  config")
    for row in rows:
        print("{ms:10.1f}{GFLOP/s:10.1f}{page faults:13,.0f}{tokens/s:12,.0f}{ratio:8.2f}  {config}".format(**row))
    operations = _print_operations(timers[0]) if a.by_operation else {}
    if a.json:
        write_json(a.json, {"arguments": vars(a), "rows": rows, "operations": operations})


def _print_operations(timer) -> dict[str, float]:
    """Prints and returns the seconds of each operation of an update, summed over threads."""
    from xfresearch.training.operations import by_operation

    found = by_operation(timer)
    total, most = sum(found.values()), list(found.items())[:SHOWN]
    rest = total - sum(seconds for _, seconds in most)
    print(f"\n{'ms':>10}{'share':>8}  operation, over all threads")
    for name, seconds in [*most, (f"{len(found) - len(most)} others", rest)]:
        print(f"{1e3 * seconds:10.1f}{seconds / total:8.1%}  {name}")
    return found


def bench_decode(a) -> None:
    """Generated tokens per second of several models, and the bytes that their caches hold per token. The prompts are random
    tokens."""
    import numpy as np

    from xfresearch import loading
    from xfresearch.models import decoding
    from xfresearch.models.closed_form import costs

    models = {workdir: loading.load(workdir) for workdir in a.workdirs}
    times = {workdir: [] for workdir in models}
    for call in range(a.rounds + 1):
        for workdir, lm in models.items():
            prompts = np.random.default_rng(0).integers(lm.config.vocab_size, size=(a.batch, a.prompt)).tolist()
            start = time.perf_counter()
            for _ in decoding.generate(lm.config, lm.params, prompts, a.tokens):
                pass
            if call:  # the first call compiles
                times[workdir].append(time.perf_counter() - start)
    rows = []
    for workdir, lm in models.items():
        counted = costs(lm.config, a.prompt + a.tokens)
        speed = a.batch * a.tokens / min(times[workdir])
        ratios = [first / own for first, own in zip(times[a.workdirs[0]], times[workdir], strict=True)]
        row = {"model": workdir, "tokens/s": speed, "ratio": float(np.median(ratios)), "parameters": counted.parameters}
        rows.append(row | {"cache bytes per token": counted.cache_bytes_per_token})
    print(f"{'tokens/s':>10}{'ratio':>8}{'parameters':>14}{'cache bytes per token':>24}  model")
    for row in rows:
        speed, ratio, parameters, cache = (row[name] for name in list(row)[1:])
        print(f"{speed:10.1f}{ratio:8.2f}{parameters:14,}{cache:24,}  {row['model']}")
    if a.json:
        write_json(a.json, {"arguments": vars(a), "rows": rows})


def bench_import(a) -> None:
    import tempfile
    from pathlib import Path

    from xfresearch.interop import speed

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "llama"
        speed.write_random(folder, speed.llama(a.width, a.layers, a.vocab), a.dtype)
        rows = speed.measure(folder, a.rounds)
    for row in rows:
        print(f"{row['what']:8}{row['seconds']:8.2f} s{row['MB/s']:8.0f} MB/s")
    if a.json:
        write_json(a.json, {"arguments": vars(a), "rows": rows})


def bench_attention(a, draw):
    """Causal self-attention with persistent memory slots."""
    from xfresearch.errors import UserError
    from xfresearch.kernels.attention import REFUSALS, attention, choose_attention, describe

    G = a.kv_heads
    K = a.head_size
    if a.heads % G:
        raise UserError(f"--kv-heads={G} is not allowed: it must be a divisor of --heads={a.heads}")
    q, k, v = (draw(a.batch, a.length, heads, K) for heads in (a.heads, G, G))
    memory = (draw(a.memory, G, K), draw(a.memory, G, K)) if a.memory else None

    def implementation(name):
        return lambda q, k, v, memory: attention(q, k, v, memory=memory, implementation=name)

    call = describe(q, k, v, memory)
    print("auto: " + ", ".join(choose_attention(call)))
    # The causal mask hides half of the context. Each pair of positions has two products.
    flops = 4 * a.batch * a.length * a.heads * K * (a.length / 2 + a.memory)
    return (
        {name: implementation(name) for name, refuse in REFUSALS.items() if not refuse(call)},
        (q, k, v, memory),
        flops,
    )


def bench_cross_entropy(a, draw):
    """Cross-entropy of a linear head in tiles of tokens, compared with holding all logits at once (whole)."""
    import jax
    import jax.numpy as jnp

    from xfresearch.errors import UserError
    from xfresearch.kernels.cross_entropy import linear_cross_entropy
    from xfresearch.kernels.head import Head

    labels_T = jnp.arange(a.tokens) % a.vocab
    weights_T = jnp.ones(a.tokens)

    def whole(x_TD, table_VD):
        wide = jnp.promote_types(x_TD.dtype, jnp.float32)
        logits_TV = jnp.einsum("TD,VD->TV", x_TD, table_VD, preferred_element_type=wide)
        return (jax.nn.logsumexp(logits_TV, -1) - jnp.take_along_axis(logits_TV, labels_T[:, None], 1)[:, 0]).sum()

    def tiled(rows):
        return lambda x_TD, table_VD: linear_cross_entropy(x_TD, Head(table_VD), labels_T, weights_T, rows=rows)[0]

    try:
        rows = [at_least(1)(word) for word in a.rows.split(",")]
    except ArgumentTypeError:
        allowed = "positive integers separated by commas"
        raise UserError(f"--rows={a.rows} is not allowed: it must be {allowed}") from None
    functions = {"whole": whole} | {f"rows={n}": tiled(n) for n in rows}
    return functions, (draw(a.tokens, a.width), draw(a.vocab, a.width)), 2 * a.tokens * a.width * a.vocab


def bench_grouped_matmul(a, draw):
    """Products of each expert's rows with its matrix, for groups of unequal size. `one matrix` is a single product with
    the same rows."""
    import jax.numpy as jnp
    import numpy as np

    from xfresearch.kernels.grouped_matmul import REFUSALS, Call, choose_grouped_matmul, grouped_matmul
    from xfresearch.sharding.devices import platform

    rng = np.random.default_rng(0)
    sizes_E = jnp.asarray(rng.multinomial(a.tokens, rng.dirichlet(np.full(a.experts, 5.0))), jnp.int32)

    def implementation(name):
        return lambda x_TD, w_EDF: grouped_matmul(x_TD, w_EDF, sizes_E, implementation=name)

    call = Call(platform(), a.dtype)
    print("auto: " + ", ".join(choose_grouped_matmul(call)))
    functions = {name: implementation(name) for name, refusal in REFUSALS.items() if not refusal(call)}
    functions["one matrix"] = lambda x_TD, w_EDF: x_TD @ w_EDF[0]
    return functions, (draw(a.tokens, a.width), draw(a.experts, a.width, a.hidden)), 2 * a.tokens * a.width * a.hidden


OPERATIONS = {
    "attention": bench_attention,
    "cross_entropy": bench_cross_entropy,
    "grouped_matmul": bench_grouped_matmul,
}
# Operations that are not one function of arrays.
ALONE = {"import_hf": bench_import, "decode": bench_decode, "update": bench_update}


def forward_and_backward(function):
    import jax
    import jax.numpy as jnp

    def both(*arguments):
        outputs, vjp = jax.vjp(function, *arguments)
        return outputs, vjp(jnp.ones_like(outputs))

    return both


def fastest(functions: dict, arguments, rounds: int) -> dict:
    """{name: seconds} of the fastest of `rounds` calls of each function. Every round calls each function once."""
    import jax

    compiled = {name: jax.jit(function) for name, function in functions.items()}
    times = {name: [] for name in functions}
    for call in range(rounds + 1):
        for name, function in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments[name]))
            if call:  # the first call compiles
                times[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in times.items()}


def compare(functions: dict, arguments, flops: float, square, rounds: int) -> list[dict]:
    """A row of figures for every implementation and the floor, for the forward pass and for forward and backward
    together (three times the FLOPs)."""
    table = {}
    for phase, factor in (("forward", 1), ("forward+backward", 3)):
        wrapped = functions if factor == 1 else {name: forward_and_backward(f) for name, f in functions.items()}
        each = dict.fromkeys(functions, arguments) | {FLOOR: (square, square)}
        times = fastest(wrapped | {FLOOR: lambda a, b: a @ b}, each, rounds)
        times[FLOOR] *= factor * flops / (2 * square.shape[0] ** 3)
        first = times[next(iter(functions))]
        for name, seconds in times.items():
            table.setdefault(name, {"implementation": name})[phase] = {
                "ms": seconds * 1e3,
                "ratio": first / seconds,
                "floors": seconds / times[FLOOR],
            }
    return list(table.values())


def main(arguments) -> None:
    a = parse(arguments)
    if a.operation in ALONE:
        ALONE[a.operation](a)
        return
    import jax
    import numpy as np

    if a.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jax.numpy.asarray(rng.normal(size=shape) / shape[-1] ** 0.5, a.dtype)

    functions, inputs, flops = OPERATIONS[a.operation](a, draw)
    rows = compare(functions, inputs, flops, draw(FLOOR_SIZE, FLOOR_SIZE), a.rounds)
    print(f"{'':14}{'forward ms':>12}{'speed-up':>10}{'floors':>8}{'+backward ms':>14}{'speed-up':>10}{'floors':>8}")
    for row in rows:
        cells = [row["implementation"].ljust(14)]
        for phase, width in (("forward", 12), ("forward+backward", 14)):
            figures = row[phase]
            cells.append(f"{figures['ms']:{width}.2f}{figures['ratio']:10.2f}{figures['floors']:8.2f}")
        print("".join(cells))
    if a.json:
        write_json(a.json, {"arguments": vars(a), "backend": jax.default_backend(), "flops": flops, "rows": rows})


if __name__ == "__main__":
    run(main)
