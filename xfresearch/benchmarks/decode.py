"""Tokens per second of decoding, side by side, after prompts of random tokens: greedy, or with --sample as `generate` does.

    python -m xfresearch.bench decode runs/a runs/b
    python -m xfresearch.bench decode --config gpt2 --config.model.dtype=float32 --against transformers
    python -m xfresearch.bench decode runs/a --against ../checkout-of-before --batch 16

Every round decodes once with each row, the pass over the prompts included. Columns: tokens per second of the median round;
milliseconds of a step, which is one token of every sequence, with quartiles; the same as a multiple of the time to read the
parameters that a token uses once, at the rate of a large product with a vector, measured now; speed relative to the first
row, the median over rounds; parameters; and bytes of cache per token.

--against decodes the first model in other processes, from a Hugging Face folder that is exported for them: transformers is
PyTorch without compilation and with the default cache, transformers_static with a static cache and, on a GPU, with the
compilation that goes with it; both are greedy only. A path is a checkout, whose code decodes. All tokens must be equal, so
the model must compute in float32: other dtypes are rounded otherwise.
"""

import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from xfresearch.benchmarks import peers
from xfresearch.benchmarks.flags import add_json, add_sizes, write_figures
from xfresearch.benchmarks.rounds import in_rounds, print_table, quartiles
from xfresearch.models.sampling import DEFAULT, Sampling
from xfresearch.runtime.errors import UserError, require

COLUMNS = {"tokens/s": "{tokens/s:.1f}", "ms per step": "{ms:.2f}", "quartiles": "{ms_low:.2f} to {ms_high:.2f}"}
COLUMNS |= {"floors": "{floors:.2f}", "speed": "{ratio:.3f} ({ratio_low:.3f} to {ratio_high:.3f})"}
COLUMNS |= {"parameters": "{parameters:,}", "cache bytes per token": "{cache bytes per token:,}", "model": "{model}"}
TRANSFORMERS = ("transformers", "transformers_static")
MODULES = ("torch", "safetensors", "transformers")  # needed by --against transformers


def add_flags(parser) -> None:
    parser.add_argument("workdirs", nargs="*", metavar="WORKDIR", help="a run's directory, a checkpoint or a folder")
    more = "a config, with random weights; may be given several times; --config.key=value changes all of them"
    parser.add_argument("--config", action="append", default=[], metavar="FILE[:arg]", help=more)
    against = "also decode the first model with transformers, transformers_static, or the code of a checkout (its path)"
    parser.add_argument("--against", default="", metavar="NAME,...", help=against)
    sample = "sample with the defaults of `generate` (temperature, top-p) instead of taking the likeliest token"
    parser.add_argument("--sample", action="store_true", help=sample)
    python = "the Python that has PyTorch and transformers (default: this one)"
    parser.add_argument("--torch-python", default="", metavar="PYTHON", help=python)
    add_sizes(parser, {"batch": 1, "prompt": 16, "tokens": 64, "rounds": 15})
    add_json(parser)


def run(a) -> None:
    import numpy as np

    models = models_of(a)
    first = next(iter(models.values()))
    prompts_BP = np.random.default_rng(0).integers(first.config.vocab_size, size=(a.batch, a.prompt))
    started: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            started |= {name: start(a, name, first, prompts_BP, Path(folder)) for name in a.against.split(",") if name}
            calls = {name: Ours(lm, prompts_BP % lm.config.vocab_size, a) for name, lm in models.items()} | started
            seconds = in_rounds(calls, a.rounds)
            for name, peer in started.items():
                require_equal(name, next(iter(calls.values())).tokens_BL, np.array(peer.start["tokens"]))
        finally:
            for peer in started.values():
                peer.kill()
    rows = [row(name, models.get(name, first), seconds, a) for name in calls]
    print_table(COLUMNS, rows)
    print(f"A floor is the reading of the parameters at {rows[0]['read bytes/s'] / 1e9:.0f} GB/s, measured now.")
    write_figures(a, {"rows": rows})


def models_of(a) -> dict:
    """{name: LanguageModel} of the runs and of the configs. Raises UserError if there are none."""
    from xfresearch.loading import loading

    if not a.workdirs + a.config:
        raise UserError("decode: give a WORKDIR or --config FILE")
    if a.overrides and not a.config:
        raise UserError(f"{a.overrides[0]} is not allowed without --config FILE")
    models = {name: loading.load(name) for name in a.workdirs}
    return models | {name: with_random_weights(name, a.overrides) for name in a.config}


def with_random_weights(name: str, overrides: list[str]):
    import jax

    from xfresearch.loading.language_model import LanguageModel
    from xfresearch.models import transformer
    from xfresearch.planning.compiling import prepare
    from xfresearch.run_config.config_files import parse

    config = prepare(parse(["--config", name, *overrides]))
    params = jax.jit(transformer.init, static_argnums=0)(config.model, jax.random.key(0))
    return LanguageModel(config.model, params, None, config)


class Ours:
    """Each call decodes, and returns the seconds. The first call, which compiles, is made here."""

    def __init__(self, lm, prompts_BP, a):
        self.lm, self.prompts, self.count, self.sampling = lm, prompts_BP.tolist(), a.tokens, sampling_of(a)
        self()

    def __call__(self) -> float:
        import numpy as np

        from xfresearch.models.decoding import generate

        began = time.perf_counter()
        chunks = list(generate(self.lm.config, self.lm.params, self.prompts, self.count, self.sampling))
        seconds = time.perf_counter() - began
        self.tokens_BL = np.concatenate([np.array(chunk) for chunk in chunks], 1)
        return seconds


def sampling_of(a) -> Sampling:
    return DEFAULT if a.sample else Sampling(temperature=0.0)


def start(a, name: str, lm, prompts_BP, folder: Path) -> peers.Peer:
    """The process that decodes with `transformers` or with another checkout, once it has decoded for the first time."""
    require(lm.config.dtype == "float32", "model.dtype", lm.config.dtype, "float32 with --against: tokens must be equal")
    request = folder / "request.json"
    sampling = asdict(sampling_of(a))
    del sampling["rules"]  # none: a checkout of before may not know them
    asked = {"prompts": prompts_BP.tolist(), "tokens": a.tokens, "sampling": sampling}
    request.write_text(json.dumps(asked))
    exported = folder / "model"
    if name in TRANSFORMERS and a.sample:
        raise UserError(f"--against={name} is not allowed with --sample: it draws other tokens")
    if name in TRANSFORMERS:
        python, more, environment = peers.torch_python(a.torch_python, name, MODULES), [name], {}
    else:
        python, more = sys.executable, []
        environment = {"PYTHONPATH": str(peers.checkout_root(name, TRANSFORMERS))}
    if not exported.exists():
        lm.export_hf(exported, dtype="float32")
    command = [python, "-P", str(peers.HERE / "decode_peer.py"), str(exported), str(request), *more]
    return peers.Peer(name, command, environment)


def require_equal(name: str, ours_BL, theirs_BL) -> None:
    """Raises UserError if tokens differ."""
    if (ours_BL != theirs_BL).any():
        row, token = map(int, next(zip(*(ours_BL != theirs_BL).nonzero(), strict=True)))
        where = f"token {token} of sequence {row} is {theirs_BL[row, token]}, ours is {ours_BL[row, token]}"
        raise UserError(f"--against={name}: the texts differ: {where}")


def row(name: str, lm, seconds: dict, a) -> dict:
    """The figures of one row. `seconds` are those of all rows, the first one first."""
    import jax.numpy as jnp
    import numpy as np

    from xfresearch.benchmarks.device_rates import read_rate
    from xfresearch.run_config.closed_form import costs

    counted = costs(lm.config, a.prompt + a.tokens)
    own_R = np.array(seconds[name])
    milliseconds = quartiles("ms", 1e3 * own_R / a.tokens)
    floor = 1e3 * counted.active_parameters * jnp.dtype(lm.config.dtype).itemsize / read_rate()
    figures = {"model": name, "tokens/s": 1e3 * a.batch / milliseconds["ms"], **milliseconds}
    figures |= {"floors": milliseconds["ms"] / floor, "read bytes/s": read_rate(), "seconds": own_R.tolist()}
    figures |= {**quartiles("ratio", next(iter(seconds.values())) / own_R), "parameters": counted.parameters}
    return figures | {"cache bytes per token": counted.cache_bytes_per_token}
