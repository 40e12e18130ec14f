"""Generated tokens per second of several models, and the bytes that their caches hold per token. The prompts are random
tokens."""

import time

from xfresearch.benchmarks.flags import add_json, add_sizes, write_figures


def add_flags(parser) -> None:
    parser.add_argument("workdirs", nargs="+", metavar="WORKDIR", help="a run's directory, a checkpoint or a folder")
    add_sizes(parser, {"batch": 1, "prompt": 16, "tokens": 64, "rounds": 15})
    add_json(parser)


def run(a) -> None:
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
    write_figures(a, {"rows": rows})
