"""Compares what every named config computes at :tiny in float64 with the record in behaviour.json.

    python -m tests.contracts.behaviour [NAME ...]      prints the differences and exits with 1 if there are any
    python -m tests.contracts.behaviour --record [NAME ...]

The record has, for each config: costs, the losses of the first STEPS updates, TOKENS tokens of greedy text, and some
logits of the trained model. Compare with it after a refactoring, which must not change any of them.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

STEPS, TOKENS, TOLERANCE = 10, 32, 1e-12
ROOT = Path(__file__).parent.parent.parent
RECORDED = Path(__file__).with_suffix(".json")
PROMPT = "12 squared is"
FLAGS = {
    "model.dtype": "float64",
    "model.param_dtype": "float64",
    "steps": STEPS,
    "optimizer.warmup": 2,
    "checkpoint.every": STEPS,
    "evaluation.every": 0,
    "evaluation.final_sequences": 8,
    "log.tracker": "jsonl",
}


def names() -> list[str]:
    return [path.stem for path in sorted((ROOT / "configs").glob("*.py")) if "def get_config(" in path.read_text()]


def behaviour(name: str, folder: Path) -> dict:
    """Costs, losses, logits and greedy text of configs/NAME.py:tiny, trained in `folder` in this process."""
    import xfresearch as xf
    from xfresearch.run_config.config_files import parse
    from xfresearch.train import main as train_main

    text = folder / "squares.txt"
    workdir = folder / name
    text.write_text("\n".join(f"{i} squared is {i * i}" for i in range(4000)))
    flags = FLAGS | {"data.cache_dir": folder / "cache"}
    file = ROOT / "configs" / f"{name}.py"
    encoder = parse(["--config", f"{file}:tiny"]).model.encoder
    if not encoder and name not in ("brody_majority", "playground"):  # they have pairs, or labels and no text
        flags["data.corpus"] = f"('text_files:{text}',)"
    train_main(
        ["--config", f"{file}:tiny", "--workdir", str(workdir), *(f"--config.{k}={v}" for k, v in flags.items())]
    )
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    lm = xf.load(workdir)
    writes = lm.tokenizer and lm.config.causal
    tokens_BL = np.arange(3 * 16).reshape(3, 16) * 7 % lm.config.vocab_size
    source, begin = ({"source": tokens_BL[:, ::2]}, "") if encoder else ({}, PROMPT)
    text_source = {"source": PROMPT} if encoder else {}
    return {
        "costs": vars(xf.costs(lm.config)),
        "losses": [row["loss"] for row in rows if "loss" in row][:STEPS],
        "logits": np.asarray(lm(tokens_BL, **source))[:, -1, :4].ravel().tolist(),
        "text": lm.generate(begin, max_new_tokens=TOKENS, temperature=0.0, seed=0, **text_source) if writes else "",
    }


def differences(now: dict, then: dict) -> list[str]:
    """One line for each value in which two behaviours differ by more than TOLERANCE."""
    listed = [f"{key}: {then[key]!r} -> {now[key]!r}" for key in ("costs", "text") if now[key] != then[key]]
    for key in ("losses", "logits"):
        if len(now[key]) != len(then[key]):
            listed.append(f"{key}: {len(then[key])} -> {len(now[key])} numbers")
        elif not np.allclose(now[key], then[key], rtol=0, atol=TOLERANCE * np.abs(then[key]).max()):
            listed.append(f"{key}: {then[key]} -> {now[key]}")
    return listed


def main(arguments: list[str]) -> int:
    recording = "--record" in arguments
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    different = 0
    for name in [a for a in arguments if a != "--record"] or names():
        with tempfile.TemporaryDirectory() as folder:
            now = behaviour(name, Path(folder))
        if recording:
            recorded[name] = now
            rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(recorded.items()))
            RECORDED.write_text(f"{{\n{rows}\n}}\n")
            continue
        result = differences(now, recorded[name])
        different += bool(result)
        print(name, *(result or ["equal"]), sep="\n  ")
    return min(different, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
