"""A training run from the command line: lock the directory, train, then print and write the results.

The results are the held-out bits per byte with compression baselines (data/baselines.py) and a sample, or the held-out
accuracy for a data set with labels; report.html; and commands to run next. None of this is in the training loop.
"""

import hashlib
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import jax
from etils import epath

from xfresearch.checkpoints import store
from xfresearch.options.overrides import split
from xfresearch.options.shipped import located
from xfresearch.run_config.config import Config
from xfresearch.run_config.config_files import Source
from xfresearch.run_config.resolving import with_vocabulary
from xfresearch.runtime import distributed
from xfresearch.runtime.command import as_typed
from xfresearch.runtime.errors import BUG, UserError, exit_code
from xfresearch.runtime.files import inside, read_object, write_json
from xfresearch.runtime.identity import config_files
from xfresearch.runtime.progress import stage
from xfresearch.training.callbacks import Callback
from xfresearch.training.samples import SEEDS, draw_samples, sampling_in_words
from xfresearch.training.workdir import lineage, locked, record, require_same_config, saved_config, starts

BASELINE_BYTES = 32 << 20  # the baselines use at most this much of the training split and of the held-out split
SAMPLE_BYTES = 16 << 30  # with several processes, larger parameters are not gathered for a sample


def run(
    config: Config,
    workdir: str,
    arguments: list[Source],
    fork: bool,
    began: float | None = None,
    panel: Callable | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict:
    """Trains in `workdir` and returns the printed results as a dict. Raises as `loop.train` and `workdir.record` do.

    `arguments` are those from which `config` was parsed, as a command has them. The process began at the time `began`, by
    default now. `panel` is that of `loop.train`. `callbacks` see the run beside the console and its tracker. A run that one
    of them ends has results like one that has finished.
    """
    from xfresearch.data.labels import trains_on_labels
    from xfresearch.data.tokenizers import vocab_size
    from xfresearch.training import loop
    from xfresearch.training.metrics import Clock

    path = epath.Path(workdir).expanduser()
    clock = Clock()
    began = began or time.time()
    clock.restore({"start": max(time.time() - began, 0.0)})
    with ExitStack() as stack:
        with clock.measure("start"):
            loop.setup_jax(config)
            watching = [*callbacks, *loop.default_callbacks(config)]
            require_same_config(config)
            distributed.run_on_first(lambda: stack.enter_context(locked(workdir)), "locking the directory")
            with clock.measure("data"):
                tokenizer = None if trains_on_labels(config.data) else _tokenizer(config, path, fork)
            config = with_vocabulary(config, vocab_size(config.data, tokenizer)) if tokenizer else config
            command = _command(arguments, workdir, fork)
            distributed.run_on_first(lambda: record(path, config, fork, began, command), "recording the start")
            if not starts(path):
                raise UserError(f"--workdir={workdir} is another directory here than in process 0: all must share one")
        file = split(arguments)[0] if arguments else None
        files = config_files(located(file)) if isinstance(file, str) else {}
        result = loop.train(config, path, tokenizer, clock, fork, panel, watching, config_files=files)
        stopped_by = "" if result.finished else result.stopped_by
        summary = {
            "step": result.step,
            "workdir": str(workdir),
            "evaluation": result.evaluation,
            "starts": len(starts(path)),
            "stopped_by": stopped_by,
        }
        if stopped_by and stopped_by not in signal.Signals.__members__:
            print(f"ended after update {result.step}: {stopped_by}", file=sys.stderr)
        elif stopped_by:  # the results are those of the run that resumes
            if distributed.first():
                print(
                    f"{stopped_by}: saved step {result.step}; the same command resumes from there",
                    file=sys.stderr,
                )
            return summary | _time(clock)
        with clock.measure("results"):
            params = _gathered(result.params)
            shown = _show(config, path, arguments, tokenizer, result._replace(params=params)) if distributed.first() else {}
        return summary | shown | _time(clock)


def _command(arguments: list[Source], workdir: str, fork: bool) -> list[str]:
    """The command that makes a run with these arguments. CONFIG stands for a config that Python code has made."""
    given = [each if isinstance(each, str) else "CONFIG" for each in arguments]
    return ["python", "-m", "xfresearch.train", *given, "--workdir", workdir, *(["--fork"] if fork else [])]


def _time(clock) -> dict:
    """The account of the wall time of the run so far."""
    shares = clock.shares()
    return {"time": shares, "goodput": shares["step"], "wall_seconds": clock.total_seconds()}


def _tokenizer(config: Config, path: epath.Path, fork: bool):
    """The run's own tokenizer if it resumes: the one that the config names may have changed since. With `fork`, the
    config may name another."""
    from xfresearch.data.tokenizers import has_tokenizer, load_tokenizer, tokenizer_for

    saved = saved_config(path) if fork else config
    own = saved and (saved.data.tokenizer, saved.data.bpe_vocab) == (config.data.tokenizer, config.data.bpe_vocab)
    folder = inside(path, "tokenizer")
    resumes = distributed.shared(bool(own and store.steps(path) and has_tokenizer(folder)))
    return load_tokenizer(folder) if resumes else tokenizer_for(config.data)


def _gathered(params: dict) -> dict:
    """Unsharded `params` for the sample, gathered from all processes if there are several; {} if they are too large."""
    if not distributed.is_active():
        return params
    from jax.experimental import multihost_utils

    if sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > SAMPLE_BYTES:
        return {}
    return multihost_utils.process_allgather(params, tiled=True)


def _show(config: Config, path: epath.Path, arguments: list[Source], tokenizer, result) -> dict:
    """Prints the results of a finished run and writes its report."""
    from xfresearch.data.labels import predicts_next
    from xfresearch.training.report import write_report

    continues_text = predicts_next(config.data)
    baselines = {}
    if continues_text and len(config.data.corpus) == 1:
        with _optional("the compression baselines"):
            baselines = _baselines(config, tokenizer)
    samples = []
    if continues_text and result.params:
        with _optional("the samples"):
            samples = draw_samples(config, tokenizer, result.params)
    elif continues_text:
        print("no samples: too many parameters to gather; python -m xfresearch.generate draws some", file=sys.stderr)
    commands = _commands(config, path, arguments, samples)
    start = starts(path)[-1]
    resumed = [each["resumed"] for each in starts(path) if each.get("resumed")]
    report = ""
    with _optional("report.html"):
        report = write_report(
            path,
            config=config,
            machine={**start["machine"], **start["versions"], "commit": start["commit"]},
            baselines=baselines,
            result={**result.evaluation, "step": result.step, "time": result.clock.shares()}
            | {"goodput": f"{result.clock.shares()['step']:.1%}", "starts": len(starts(path))}
            | ({"resumed_from": "; ".join(resumed)} if resumed else {}),
            samples=samples,
            commands=commands,
            lineage=lineage(path),
        )
    with _optional("the results"):
        _print(config, path, baselines, result, samples, report, commands)
        sys.stdout.flush()
    return {"baselines": baselines, "samples": samples, "report": str(report)}


@contextmanager
def _optional(what: str):
    """A failure here does not fail a run that is finished: it is a warning. A bug prints its stack trace too."""
    try:
        yield
    except Exception as error:
        if exit_code(error) == BUG and not isinstance(error, OSError):
            traceback.print_exc()
        print(f"warning: {what} could not be written: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the text left in the buffer goes there


def _commands(config: Config, path: epath.Path, arguments: list[Source], samples: list[dict]) -> dict[str, str]:
    """{label: shell command} to run next. `generate` repeats the first sample, and is left out without samples; training
    longer is left out without a config file."""
    file, overrides = split(arguments)
    commands = {"evaluate": ["evaluate", "--workdir", str(path)]}
    if samples:
        commands["generate"] = ["generate", "--workdir", str(path), "--prompt", samples[0]["prompt"]]
    if isinstance(file, str):
        again = ["--config", file, *(f"--config.{key}={value}" for key, value in overrides if key != "steps")]
        longer = [*again, "--workdir", str(path), "--fork", f"--config.steps={2 * config.steps}"]
        commands["train longer"] = ["train", *longer]
    return {
        name: f"{as_typed(f'python -m xfresearch.{words[0]}')} {shlex.join(words[1:])}"
        for name, words in commands.items()
    }


def _print(config, path, baselines, result, samples, report, commands) -> None:
    from xfresearch.data import coverage

    if result.evaluation:
        name = "bits_per_byte" if "bits_per_byte" in result.evaluation else "accuracy"
        source = f"{config.evaluation.split} split of {config.data.corpus[0]}"
        print(f"\nheld-out {name.replace('_', ' ')} ({source})")
        rows = [*(baselines.items() if name == "bits_per_byte" else ()), ("this model", result.evaluation[name])]
        for label, value in sorted(rows, key=lambda row: -row[1]):
            print(f"  {value:6.3f}  {label}")
        if note := coverage.note(result.evaluation):
            print(note)
    for sample in samples[:: len(SEEDS)]:  # the report has all of them
        prompt = sample["prompt"]
        print(f"\nsample, after {prompt!r} ({sampling_in_words()}):\n{prompt}{sample['text']}")
    print()
    shares = ", ".join(f"{name} {share:.1%}" for name, share in result.clock.shares().items())
    print(f"goodput      {result.clock.shares()['step']:.1%} of {result.clock.total_seconds():,.0f} s, {_starts(path)}")
    print(f"time         {shares}")
    print(f"checkpoint   {path}/checkpoints/{result.step}")
    print(f"report       {report}")
    for name, text in commands.items():
        print(f"{name:<12} {text}")


def _starts(path: epath.Path) -> str:
    count = len(starts(path))
    return "1 start" if count == 1 else f"{count} starts"


def _baselines(config: Config, tokenizer) -> dict[str, float]:
    """The compression baselines for the run's corpus, computed once and kept in the cache."""
    from xfresearch.data.baselines import compression_baselines
    from xfresearch.data.cache import cache_root
    from xfresearch.data.corpora import documents

    corpus = config.data.corpus[0]
    splits = (config.evaluation.split, "train")
    heldout, train = (_beginning(documents(corpus, name, config.data, tokenizer)) for name in splits)
    key = hashlib.sha256(b"\0".join([*train, b"heldout", *heldout])).hexdigest()[:16]
    cached = inside(cache_root(config.data), "baselines", f"{key}.json")
    if cached.exists():
        return read_object(cached)
    with stage("compression baselines"):
        baselines = compression_baselines(train, heldout)
    with _optional(str(cached)):
        write_json(cached, baselines)
    return baselines


def _beginning(texts: Iterator[bytes]) -> list[bytes]:
    """The first BASELINE_BYTES of the texts."""
    parts = []
    left = BASELINE_BYTES
    while left and (text := next(texts, None)) is not None:
        parts.append(text[:left])
        left -= len(parts[-1])
    return parts
