"""python -m xfresearch.benchmarks.gpu_rows ROW FIGURES [NAME] [--tiny]

One row of `bench gpu` in its own process. It writes its figures to the JSON file FIGURES.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from xml.etree import ElementTree

from xfresearch.runtime.files import write_json

STEPS, STOP_AFTER = 20, 5
TOLERANCE = 2e-2  # of a loss in bfloat16, relative to float32
# A few layers of real widths, on bytes of Python's standard library, with the vocabulary that the model is for.
FEW = ("model.depth=2", "model.vocab_size=50304", "batch_size=8")
LLAMA = ("model.depth=2", "model.width=2048", "model.blocks.main.attention.heads=16", "batch_size=4")
REAL = {
    "gpt2": FEW,
    "llama": (*LLAMA, "model.blocks.main.feed_forward.hidden=5632", "model.vocab_size=32000"),
    "moe": FEW,
    "all_attention": FEW,
    "lambda_lm": FEW,
    "no_query": FEW,
}
RUN = (
    f"steps={STEPS}",
    "optimizer.warmup=5",
    "data.corpus=python_stdlib",
    "data.tokenizer=bytes",
    f"checkpoint.every={STEPS}",
    f"evaluation.every={STEPS}",
    "evaluation.sequences=16",
    "evaluation.final_sequences=16",
)
# Packages that an installation may lack, and what does not work without them.
OPTIONAL = {
    "matplotlib": "report.html has no charts, and is not written",
    "pytest": "the tests of kernels do not run",
    "tokamax": "its kernels are not compared",
    "torch": "PyTorch is not compared",
    "transformers": "its decoding is not compared",
}


def arguments_of(name: str, tiny: bool, *overrides: str) -> list[str]:
    chosen = (*(() if tiny else REAL[name]), *RUN, *overrides)
    file = f"configs/{name}.py" + (":tiny" if tiny else "")
    return ["--config", file, *(f"--config.{each}" for each in chosen)]


def device(*_) -> dict:
    """The machine, and the libraries that are missing."""
    import jax

    from xfresearch.runtime.hardware import environment

    missing = {name: what for name, what in OPTIONAL.items() if not importlib.util.find_spec(name)}
    words = f"{environment()['machine']['devices']}, jax {jax.__version__}"
    return {"environment": environment(), "missing": missing, "words": words}


def train(name: str, tiny: bool) -> dict:
    """Trains, evaluates, generates and saves; is stopped by SIGTERM, which saves, and resumed; trains in float32."""
    from xfresearch import generate
    from xfresearch.train import main as train_main

    problems = []
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        whole, stopped, wide = (folder / each for each in ("whole", "stopped", "float32"))
        train_main([*arguments_of(name, tiny, "model.dtype=bfloat16"), "--workdir", str(whole)])
        generate.main(["--workdir", str(whole), "--prompt", "import ", "--max-new-tokens", "16"])
        if not _stop(stopped, name, tiny):
            problems.append("the run ended before SIGTERM came")
        short_run(stopped, name, tiny)
        short_run(wide, name, tiny, "float32")
        of_runs = {each.name: losses(each) for each in (whole, stopped, wide)}
        rate = _rate(whole)
    resumed = furthest(of_runs["whole"], of_runs["stopped"])
    precise = furthest(of_runs["float32"], of_runs["whole"])
    problems += [f"the resumed run's losses differ by {resumed:.1e}"] if resumed else []
    problems += [f"bfloat16 differs by {precise:.1e} from float32, allowed are {TOLERANCE}"] if precise > TOLERANCE else []
    problems += ["the loss did not fall"] if not of_runs["whole"][-1] < of_runs["whole"][0] else []
    words = f"resumed by {resumed:.1e}, bfloat16 by {precise:.1e}, {rate:,.0f} tokens/s"
    figures = {"losses": of_runs, "resumed differs": resumed, "bfloat16 differs": precise, "tokens/s": rate}
    return figures | {"words": words, "problems": problems}


def short_run(workdir: Path, name: str, tiny: bool, dtype: str = "bfloat16", every: int = STEPS):
    """Trains without evaluation, samples and report, or resumes. Returns the outcome of the loop."""
    from xfresearch.data.tokenizers import tokenizer_for
    from xfresearch.planning.compiling import prepare
    from xfresearch.run_config.config_files import parse
    from xfresearch.training import loop

    own = (f"model.dtype={dtype}", "evaluation.every=0", f"checkpoint.every={every}", "log.tracker=jsonl")
    config = prepare(parse(arguments_of(name, tiny, *own)))
    loop.setup_jax(config)
    return loop.train(config, workdir, tokenizer_for(config.data))


def _stop(workdir: Path, name: str, tiny: bool) -> bool:
    """Trains, and sends SIGTERM to this process once a few updates have ended. Returns whether the run stopped for it."""
    metrics, ended = workdir / "metrics.jsonl", threading.Event()

    def watch():
        while not ended.wait(0.002):
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= STOP_AFTER:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        return short_run(workdir, name, tiny).stopped_by == "SIGTERM"
    finally:
        ended.set()
        watcher.join()


def killed(name: str, tiny: bool) -> dict:
    """Trains, is killed by SIGKILL, and resumes: updates that were not saved are lost, and computed again."""
    with tempfile.TemporaryDirectory() as directory:
        whole, dead = (Path(directory) / each for each in ("whole", "dead"))
        program = f"from xfresearch.benchmarks import gpu_rows; gpu_rows.short_run({str(dead)!r}, {name!r}, {tiny}, every=5)"
        process = subprocess.Popen([sys.executable, "-c", program])
        while process.poll() is None and not (dead / "checkpoints" / "5").exists():
            time.sleep(0.002)
        process.kill()
        alive = process.wait() == 0
        for workdir in (whole, dead):
            short_run(workdir, name, tiny, every=5)
        apart = furthest(losses(whole), losses(dead))
    problems = [f"the resumed run's losses differ by {apart:.1e}"] if apart else []
    problems += ["the run ended before it was killed"] if alive else []
    return {"words": f"resumed by {apart:.1e}", "resumed differs": apart, "problems": problems}


def losses(workdir: Path) -> list[float]:
    """The loss of each update; of an update that ran twice, the later one."""
    from xfresearch.training.metrics import read_metrics

    rows = read_metrics(workdir / "metrics.jsonl")
    by_step = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
    return [by_step[step] for step in sorted(by_step)]


def _rate(workdir: Path) -> float:
    """Tokens per second of the last update."""
    from xfresearch.training.metrics import read_metrics

    return [row for row in read_metrics(workdir / "metrics.jsonl") if row["kind"] == "train"][-1]["tokens_per_second"]


def furthest(expected: list[float], actual: list[float]) -> float:
    """The largest relative difference of two runs' losses; infinite if they have not the same number of updates."""
    if len(expected) != len(actual) or not expected:
        return float("inf")
    return max(abs(a - b) / abs(a) for a, b in zip(expected, actual, strict=True))


def kernel_tests(*_) -> dict:
    """The tests with the mark `gpu`. XLA_FLAGS is set because the tests choose flags for a CPU otherwise."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        # A line for each test: the log of a row that is stopped then names what failed.
        command = [sys.executable, "-m", "pytest", "-vv", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        own = {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cuda,cpu"), "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
        code = subprocess.run([*command, *gpu_test_files()], env=os.environ | own).returncode
        return of_tests(ElementTree.parse(report).getroot(), code)


def of_tests(cases: ElementTree.Element, code: int) -> dict:
    """The figures of a report of pytest, which calls a test that could not start an error and no failure. code: its exit
    status."""
    counts = next(cases.iter("testsuite")).attrib
    bad = [case.get("name", "") for case in cases.iter("testcase") if {"failure", "error"} & {each.tag for each in case}]
    ran = int(counts["tests"]) - int(counts["skipped"]) - int(counts["errors"])
    problems = [f"failed: {', '.join(bad)}"] if bad else [] if ran else ["no test ran"]
    problems += [f"pytest ended with {code}"] if code and not bad else []
    return {"tests": ran, "failed": bad, "words": f"{ran} tests, {len(bad)} failed", "problems": problems}


def gpu_test_files() -> list[str]:
    """Files with tests for a GPU: the others may import what is not installed."""
    return [str(path) for path in sorted(Path("tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]


ROWS = {"device": device, "train": train, "killed": killed, "kernel_tests": kernel_tests}


def main(row: str, figures: str, name: str = "", size: str = "") -> None:
    write_json(figures, ROWS[row](name, size == "--tiny"))


if __name__ == "__main__":
    main(*sys.argv[1:])
