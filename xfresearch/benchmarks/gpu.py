"""Checks and measures this commit on one accelerator in a few minutes. Each row is a process, the most important first.

    make gpu
    python -m xfresearch.bench gpu --list
    python -m xfresearch.bench gpu --only train_gpt2,loop --json gpu.json
    JAX_PLATFORMS=cpu python -m xfresearch.bench gpu --tiny --only train_gpt2,killed

A row that takes longer than its limit (--list has them) is stopped; rows that do not begin within --seconds are left out.
The file of --json is written anew after every row, and keeps the rows of the same commit and device that are not run again.
Nothing is installed: the row `device` lists what is missing. Run it at the root of a checkout.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from xfresearch.benchmarks.peers import TORCH
from xfresearch.evaluation.held_out import at_least
from xfresearch.runtime.errors import UserError, nearest
from xfresearch.runtime.files import check_output, write_json

ROWS_MODULE = "xfresearch.benchmarks.gpu_rows"
GPT2 = ("configs/gpt2.py", "batch_size=32", "model.vocab_size=50257")
GPT2_FILE = ("--config", GPT2[0], f"--config.{GPT2[2]}")
LLAMA: tuple[str, ...] = ("configs/llama.py", "batch_size=16", "model.vocab_size=32000", "model.width=2048")
LLAMA += ("model.depth=16",)
LLAMA += ("model.blocks.main.attention.heads=16", "model.blocks.main.feed_forward.hidden=5632", "model.dtype=bfloat16")
SLOTS = ("configs/all_attention.py", "batch_size=64", "model.vocab_size=50257", "model.blocks.main.attention.dropout=0")


class Row(NamedTuple):
    words: str
    command: tuple[str, ...]  # of python -m; {figures} is the JSON file that it writes
    gpu: bool = False  # whether the row makes sense on a GPU only
    seconds: int = 60  # the limit, after which the row is stopped


def _own(row: str, *name: str) -> tuple[str, ...]:
    return (ROWS_MODULE, row, "{figures}", *name)


def _update(config: str, *overrides: str, beside: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> tuple[str, ...]:
    configs = tuple(word for name in (config, *beside) for word in ("--config", name))
    given = tuple(f"--config.{each}" for each in ("data.tokenizer=bytes", *overrides))
    return ("xfresearch.bench", "update", *configs, *given, "--rounds", "10", "--json", "{figures}", *flags)


def _decode(config: str, *overrides: str) -> tuple[str, ...]:
    given = (f"--config.{each}" for each in overrides)
    return ("xfresearch.bench", "decode", "--config", config, *given, "--rounds", "5", "--json", "{figures}")


COMPILED = ("--against", "torch_compile", "--apart")
SMALL: tuple[str, ...] = ("model.width=768", "model.depth=12", "model.blocks.main.attention.heads=12")
SMALL += ("sequence_length=1024", "batch_size=16", "model.vocab_size=50304", "model.dtype=bfloat16")
STUDY: tuple[str, ...] = ("model.width=96", "model.depth=4", "model.blocks.main.attention.heads=3", "model.vocab_size=1024")
STUDY += ("model.position=none", "model.blocks.main.attention.position=rope", "sequence_length=128", "batch_size=16")
BIASED = tuple(f"configs/variants.py:{name}" for name in ("alibi", "t5", "relative_key", "adaptive_span", "learned_sink"))
CHANGES = ("differential", "query_identity_whole", "value_is_key", "macaron", "value_residual")
OTHERS: tuple[str, ...] = ("configs/lambda_lm.py", "configs/no_query.py", "configs/merged_query.py")
OTHERS += tuple(f"configs/variants.py:{name}" for name in CHANGES)
THIN = ("configs/single_head_deep.py", "batch_size=16", "model.vocab_size=50304", "model.dtype=bfloat16")
ROPE, DOCUMENTS = (f"xfresearch/benchmarks/positions.py:{name}" for name in ("rope", "documents"))
LOOP_FLAGS = ("--config.batch_size=32", "--updates", "20", "--rounds", "3", "--json", "{figures}")
LOOP = ("xfresearch.bench", "loop", *GPT2_FILE, *LOOP_FLAGS)
DECODE, BILLION = _decode(GPT2[0], GPT2[2]), _decode(LLAMA[0], *LLAMA[2:])
PEER = ("--config.model.dtype=float32", "--against", "transformers_static")
TRAINED = "trains 20 updates, evaluates, generates, saves, is stopped and resumed, and trains in float32"
ROWS = {
    "device": Row("machine, versions, and what is not installed", _own("device")),
    "train_gpt2": Row(f"gpt2, 2 layers: {TRAINED}", _own("train", "gpt2")),
    "update_gpt2": Row("gpt2 124M, 32 x 1024, beside torch.compile", _update(*GPT2, flags=COMPILED), gpu=True, seconds=200),
    "loop": Row("gpt2 124M: the training loop beside bare updates", LOOP, gpu=True),
    "decode": Row("gpt2 124M, bfloat16, batch 1: 64 new tokens", DECODE, gpu=True),
    "decode_64": Row("the same, batch 64", (*DECODE, "--batch", "64"), gpu=True),
    "decode_sampled": Row("the same, batch 64, sampled by the defaults", (*DECODE, "--batch", "64", "--sample"), gpu=True),
    "decode_peer": Row("gpt2 124M, float32, batch 1, beside transformers", (*DECODE, *PEER), gpu=True, seconds=120),
    "decode_peer_64": Row("the same, batch 64", (*DECODE, *PEER, "--batch", "64"), gpu=True, seconds=120),
    "decode_1b": Row("llama 953M, bfloat16, batch 1", BILLION, gpu=True),
    "decode_1b_64": Row("the same, batch 64", (*BILLION, "--batch", "64"), gpu=True),
    "decode_1b_peer": Row("llama 953M, float32, batch 1, beside transformers", (*BILLION, *PEER), gpu=True, seconds=150),
    "train_llama": Row("llama, 2 layers of width 2048: the same", _own("train", "llama")),
    "train_moe": Row("moe, 2 layers: the same", _own("train", "moe")),
    "kernel_tests": Row("the tests of kernels that need a GPU", _own("kernel_tests"), gpu=True, seconds=150),
    "train_all_attention": Row("all_attention, 2 layers: the same", _own("train", "all_attention")),
    "train_lambda_lm": Row("lambda_lm, 2 layers: the same", _own("train", "lambda_lm")),
    "train_no_query": Row("no_query, 2 layers: the same", _own("train", "no_query")),
    "killed": Row("gpt2: killed by SIGKILL, and resumed", _own("killed", "gpt2")),
    "update_llama": Row(
        "llama 953M, 16 x 2048, beside torch.compile", _update(*LLAMA, flags=COMPILED), gpu=True, seconds=200
    ),
    "update_moe": Row("moe 0.5B, 32 x 1024", _update("configs/moe.py", "batch_size=32", "model.vocab_size=32000"), gpu=True),
    "update_all_attention": Row("all_attention without dropout, 64 x 512", _update(*SLOTS), gpu=True),
    "update_biased": Row(
        "biases, spans, sinks and documents beside RoPE",
        _update(ROPE, *SMALL, beside=(DOCUMENTS, *BIASED)),
        gpu=True,
        seconds=120,
    ),
    "update_variants": Row(
        "other attentions, and a block with two feed-forward layers, beside softmax's",
        _update("configs/variants.py", *SMALL, beside=OTHERS),
        gpu=True,
        seconds=150,
    ),
    "update_thin": Row("144 layers of one head of 64, 16 x 1024", _update(*THIN), gpu=True),
    "studies": Row(
        "a small model of the studies, float32: 5 seeds in one program beside one",
        _update("configs/variants.py:tiny", *STUDY, flags=("--together", "5")),
        gpu=True,
    ),
    "growth": Row("gpt2 124M at lengths of 1,024 to 4,096", _update(*GPT2, flags=("--grow", "length")), gpu=True),
}


def add_flags(parser) -> None:
    parser.add_argument("--list", action="store_true", help="print the rows in their order, and end")
    parser.add_argument("--only", default="", metavar="ROW,...", help="run only these rows (device always runs)")
    parser.add_argument("--tiny", action="store_true", help="train the configs at :tiny, to try the command on a CPU")
    parser.add_argument("--seconds", type=at_least(1), default=240, metavar="N", help="for all rows; default 240")
    limit = "the limit of each row; default: its own, see --list"
    parser.add_argument("--row-seconds", type=at_least(1), metavar="N", help=limit)
    parser.add_argument("--json", default="gpu.json", metavar="FILE", help="the file of figures; default gpu.json")


def run(a) -> None:
    if a.list:
        for name, row in ROWS.items():
            print(f"{name:22}{row.seconds:4} s  {row.words}{'; on a GPU' if row.gpu else ''}")
        return
    names = chosen(a.only)
    if not Path("configs", "gpt2.py").is_file():
        raise UserError("bench gpu must run at the root of a checkout: configs/gpt2.py is not in this directory")
    check_output("--json", a.json)
    began = time.monotonic()
    outcomes: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            left = a.seconds - (time.monotonic() - began)
            outcome = _outcome(name, a, outcomes, left, Path(folder))
            outcomes[name] = outcome
            print(f"{name:22}{outcome['status']:9}{outcome['seconds']:6.1f} s  {outcome['words']}", flush=True)
            write(a.json, outcomes)
    missing = outcomes["device"].get("figures", {}).get("missing", {})
    for package, without in missing.items():
        print(f"{package} is not installed: {without}")


def chosen(only: str) -> list[str]:
    """The rows to run, in their order. Raises UserError for a name that no row has."""
    wanted = [name for name in only.split(",") if name]
    for name in wanted:
        if name not in ROWS:
            raise UserError(f"--only={name} is not allowed: it must be of {', '.join(ROWS)}{nearest(name, ROWS)}")
    return [name for name in ROWS if not wanted or name in wanted or name == "device"]


def _outcome(name: str, a, outcomes: dict, left: float, folder: Path) -> dict:
    """The outcome of a row: ok, failed, stopped, or not run."""
    row = ROWS[name]
    figures = outcomes.get("device", {}).get("figures")
    if name != "device" and not figures:
        return _not_run("the row device failed")
    if row.gpu and figures["environment"]["machine"]["backend"] != "gpu":
        return _not_run(f"it needs a GPU, and this is a {figures['environment']['machine']['backend']}")
    if left <= 0:
        return _not_run(f"the {a.seconds} seconds of --seconds are over")
    file = folder / f"{name}.json"
    command = [file if word == "{figures}" else word for word in row.command]
    command += ["--tiny"] if a.tiny and row.command[0] == ROWS_MODULE and len(row.command) > 3 else []
    return started([sys.executable, "-m", *map(str, command)], file, min(a.row_seconds or row.seconds, left))


def _not_run(why: str) -> dict:
    return {"status": "not run", "seconds": 0.0, "words": why}


def started(command: list[str], file: Path, seconds: float) -> dict:
    """Runs a command that writes its figures to `file`. After `seconds` it is ended with all its processes."""
    began, log = time.monotonic(), file.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(process)
        except BaseException:
            _end(process)
            raise
    outcome = {"seconds": time.monotonic() - began}
    last = log.read_text(errors="replace").strip().splitlines()[-20:]
    if not file.exists():
        stopped = process.returncode == -signal.SIGKILL
        words = f"not done after {seconds:.0f} s" if stopped else (last or ["it printed nothing"])[-1][:200]
        return outcome | {"status": "stopped" if stopped else "failed", "words": words, "log": last}
    figures = json.loads(file.read_text())
    problems = figures.get("problems") or [row["error"] for row in figures.get("rows", ()) if row.get("error")]
    status = {"status": "failed", "log": last} if problems else {"status": "ok"}
    return outcome | status | {"words": "; ".join(problems) or words_of(figures), "figures": figures}


def _end(process) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def words_of(figures: dict) -> str:
    """One line of a row's figures."""
    if "words" in figures:
        return figures["words"]
    if "row" in figures:  # of bench loop
        return f"{figures['row']['ratio']:.3f} of bare updates"
    first = figures["rows"][0]
    if "floors" in first:  # of bench decode
        words = f"{first['tokens/s']:,.0f} tokens/s, {first['floors']:.1f} times the memory-bound floor"
        peers = [f"{1 / row['ratio']:.2f} times as fast as {row['model']}" for row in figures["rows"][1:]]
        return "; ".join([words, *peers])
    words = f"{first['tokens/s']:,.0f} tokens/s, MFU {first['MFU']:.3f}, {first['memory_bytes'] / 1e9:.1f} GB"
    for row in figures["rows"][1:]:
        peer = row["config"] in TORCH
        words += f"; {1 / row['ratio']:.2f} of {row['config']}" if peer else f"; {row['config']} {row['ratio']:.2f} as fast"
    if "exponent" in figures:
        words += f"; time as {figures['grow']}^{figures['exponent']:.2f}, FLOPs ^{figures['expected_exponent']:.2f}"
    return words


def write(path: str, outcomes: dict) -> None:
    """Writes the rows with the figures of the device, and keeps other rows of the same commit and device."""
    figures = outcomes["device"].get("figures", {})
    here = figures.get("environment", {})
    old = json.loads(Path(path).read_text()) if Path(path).exists() else {}
    same = old.get("commit") == here.get("commit") and old.get("machine") == here.get("machine")
    kept = old.get("rows", {}) if same else {}
    rows = kept | {name: row for name, row in outcomes.items() if row["status"] != "not run" or name not in kept}
    write_json(path, here | {"rows": {name: rows[name] for name in ROWS if name in rows}})
