"""A training run from the command line: claim the directory, train, then show what came out.

What it ends with: held-out bits per byte beside three marks (data/marks.py), a sample, report.html and the commands to go
on. None of this is in the training loop.
"""

import dataclasses
import hashlib
import json
import shlex
import sys

from etils import epath

from xfresearch.config import Config
from xfresearch.training.workdir import claimed, record

MARK_BYTES = 32 << 20  # the marks are fitted on at most this much of the training split


def run(config: Config, workdir: str, config_argument: str, fork: bool) -> dict:
    """Trains in `workdir` and returns what was printed, as a dict. Raises as `loop.train` and `workdir.record` do."""
    from xfresearch.data.tokenizers import tokenizer_for
    from xfresearch.training import loop
    from xfresearch.training.abstract import with_vocabulary

    with claimed(workdir) as path:
        loop.setup_jax(config)
        tokenizer = tokenizer_for(config.data)
        config = with_vocabulary(config, tokenizer.vocab_size)
        record(path, config, fork)
        tokenizer.save(str(path / "tokenizer"))
        result = loop.train(config, path, tokenizer)
        summary = {
            "step": result.step,
            "workdir": str(workdir),
            "evaluation": result.evaluation,
            "time": result.clock.shares(),
        }
        if result.stopped_by:
            print(
                f"{result.stopped_by}: saved step {result.step}; the same command goes on from there", file=sys.stderr
            )
            return summary
        return summary | _show(config, path, config_argument, tokenizer, result)


def _show(config: Config, path: epath.Path, config_argument: str, tokenizer, result) -> dict:
    """Prints and writes what a finished run has to say."""
    from xfresearch.training.report import write_report

    marks = _marks(config) if len(config.data.corpus) == 1 else {}
    prompt, sample = _sample(config, tokenizer, result.params)
    first_line = (prompt.splitlines() or [""])[0]
    commands = {
        "evaluate": f"python -m xfresearch.evaluate --workdir {path}",
        "generate": f"python -m xfresearch.generate --workdir {path} --prompt {shlex.quote(first_line)}",
        "go on": f"python -m xfresearch.train --config {config_argument} --workdir {path} --fork "
        f"--config.steps={2 * config.steps}",
    }
    start = json.loads((path / "run.json").read_text())["starts"][-1]
    report = write_report(
        path,
        config=dataclasses.asdict(config),
        machine={**start["machine"], **start["versions"], "commit": start["commit"]},
        marks=marks,
        result={**result.evaluation, "step": result.step, "time": result.clock.shares()},
        sample=sample,
        prompt=prompt,
        commands=commands,
    )
    _print(config, path, marks, result, prompt, sample, report, commands)
    return {"marks": marks, "sample": sample, "report": str(report)}


def _print(config, path, marks, result, prompt, sample, report, commands) -> None:
    if result.evaluation:
        print(f"\nheld-out bits per byte ({config.evaluation.split} split of {', '.join(config.data.corpus)})")
        rows = [*marks.items(), ("this model", result.evaluation["bits_per_byte"])]
        for name, value in sorted(rows, key=lambda row: -row[1]):
            print(f"  {value:6.3f}  {name}")
    print(f"\nsample, after {prompt!r}:\n{prompt}{sample}\n")
    shares = ", ".join(f"{name} {share:.1%}" for name, share in result.clock.shares().items())
    print(f"time         {shares}")
    print(f"checkpoint   {path}/checkpoints/{result.step}")
    print(f"report       {report}")
    for name, text in commands.items():
        print(f"{name:<12} {text}")


def _marks(config: Config) -> dict[str, float]:
    """The marks for the run's corpus, computed once and kept in the cache."""
    from xfresearch.command import write_json
    from xfresearch.data.cache import cache_root
    from xfresearch.data.corpora import documents
    from xfresearch.data.marks import marks

    corpus, split = config.data.corpus[0], config.evaluation.split
    heldout = list(documents(corpus, split, config.data))
    train, size = [], 0
    for text in documents(corpus, "train", config.data):
        if size >= MARK_BYTES:
            break
        train.append(text)
        size += len(text)
    key = hashlib.sha256(b"\0".join([*train, b"heldout", *heldout])).hexdigest()[:16]
    kept = epath.Path(cache_root(config.data)) / "marks" / f"{key}.json"
    if not kept.exists():
        write_json(kept, marks(train, heldout))
    return json.loads(kept.read_text())


def _sample(config: Config, tokenizer, params) -> tuple[str, str]:
    """The prompt and what the model writes after it."""
    from xfresearch.api import LanguageModel
    from xfresearch.data.corpora import documents

    prompt = config.log.sample
    if not prompt:
        first = next(iter(documents(config.data.corpus[0], config.evaluation.split, config.data)))
        prompt = "".join(first[:400].decode("utf8", "ignore").splitlines(keepends=True)[:2])[:80]
    prompt = tokenizer.decode(tokenizer.encode(prompt.encode())[: config.model.max_length // 2])
    lm = LanguageModel(config.model, params, tokenizer, config)
    return prompt, lm.generate(prompt, temperature=0.7, seed=config.seed)
