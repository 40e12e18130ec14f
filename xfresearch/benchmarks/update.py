"""Updates of training runs: time, training FLOPs per second, page faults, and tokens per second beside the first one."""

from xfresearch.benchmarks.flags import add_json, add_sizes
from xfresearch.files import write_json
from xfresearch.held_out import at_least

SHOWN = 9  # operations of an update


def add_flags(parser) -> None:
    parser.add_argument(
        "configs", nargs="+", metavar="FILE[:arg]", help="configs; --config.key=value changes all of them"
    )
    add_sizes(parser, {"rounds": 15})
    add_json(parser)
    together = "also update N runs of the first config in one program (jax.vmap); its figures are for one of them"
    parser.add_argument("--together", type=at_least(1), default=1, metavar="N", help=together)
    parser.add_argument(
        "--by-operation", action="store_true", help="also the time of each operation of the first config"
    )


def run(a) -> None:
    import numpy as np

    from xfresearch.config.files import parse as read
    from xfresearch.config.resolving import with_vocabulary
    from xfresearch.data.tokenizers import vocab_size
    from xfresearch.models.closed_form import costs
    from xfresearch.training.timing import Timer, timed_rounds

    configs = {name: read(["--config", name, *a.overrides]) for name in a.configs}
    configs = {
        name: with_vocabulary(each, each.model.vocab_size or vocab_size(each.data)) for name, each in configs.items()
    }
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
