"""The report: its contents, and in a real browser no console message and no request."""

import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

from tests.tiny_runs import tiny_config
from xfresearch.pages.colours import LIGHT
from xfresearch.pages.html import short
from xfresearch.training.metrics import MetricsLog
from xfresearch.training.report import _busiest, write_report

BASELINES = {"unigram entropy": 4.699, "byte trigram": 2.859, "xz -9": 2.012}
HOSTILE = "<script>console.error('sample')</script><img src='http://example.invalid/x.png'>"
SAMPLE = f'    """Return the arguments.\x00"""\n    if len(names) < 2:\n        return {HOSTILE}\n\tnaïve été\udc80\n'


@pytest.fixture
def report(tmp_path):
    """The report of a made-up run of 1,000 steps."""
    log, noise = MetricsLog(tmp_path, 0), np.random.default_rng(0).normal(size=1001)
    for step in range(1, 1001):
        loss = 1.15 + 4.4 * step**-0.35 + 0.06 * noise[step]
        rate = 1e-3 * min(step / 100, 0.55 + 0.45 * np.cos(np.pi * step / 1000))
        row = {"loss": loss, "bits_per_byte": loss / np.log(2), "learning_rate": rate}
        log.write(step, "train", row | {"tokens_per_second": 21_000 + 900 * noise[step] if step != 500 else np.nan})
        if step % 100 == 0:
            log.write(step, "evaluation", {"loss": loss + 0.05, "bits_per_byte": (loss + 0.05) / np.log(2)})
    log.close()
    time = {"step": 0.871, "input": 0.002, "evaluation": 0.064, "checkpoint": 0.008, "compile": 0.055}
    return write_report(
        tmp_path,
        config=tiny_config(),
        machine={"cpu": "Some Processor", "cores": 2, "memory_gb": 25.3, "jax": "0.10.2", "commit": "803ab78" * 5},
        baselines=BASELINES,
        result={
            "bits_per_byte": 1.816,
            "loss": 1.2588,
            "perplexity": 3.5212,
            "tokens": 1048576,
            "step": 1000,
            "time": time,
        },
        samples=[{"prompt": "def main(argv):\n", "seed": seed, "text": SAMPLE} for seed in range(3)],
        commands={
            "evaluate": "python -m xfresearch.evaluate --workdir runs/a",
            "generate": "python -m xfresearch.generate",
        },
        lineage=[
            {"path": "runs/b", "kind": "run", "step": 200, "digest": "4bf9"},
            {"path": "models/pythia", "kind": "Hugging Face folder", "step": None, "digest": "0f3a"},
        ],
    )


def chromium() -> str:
    """The browser to test with, by default one on PATH. $CHROMIUM overrides. Skips if there is none."""
    names = [os.environ["CHROMIUM"]] if "CHROMIUM" in os.environ else ["chromium", "chromium-browser", "google-chrome"]
    found = next(filter(None, map(shutil.which, names)), None)
    return found or pytest.skip(f"no browser on this machine: looked for {', '.join(names)}")


def browse(page, directory, *flags) -> tuple[list[str], list[str]]:
    """Opens `page` in a headless browser. (console messages, URLs that the page requested), and a screenshot."""
    net_log, picture = directory / "net.json", directory / "page.png"
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    command = [
        chromium(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        *quiet,
        f"--user-data-dir={directory}/profile",
    ]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--log-net-log={net_log}", "--enable-logging=stderr", "--v=0"]
    command += [f"--screenshot={picture}", "--hide-scrollbars", "--window-size=1100,3400", *flags, f"file://{page}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert picture.exists() and picture.stat().st_size > 5000, done.stderr
    log = json.loads(net_log.read_text())
    started = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    requests = [
        event["params"] for event in log["events"] if event["type"] == started and "url" in event.get("params", {})
    ]
    # requests of the browser itself (updates, accounts) have no page as their initiator
    asked = [request["url"] for request in requests if request.get("initiator") != "not an origin"]
    return re.findall(r":CONSOLE.*\] (.*)", done.stderr), asked


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_browser_logs_nothing_and_requests_nothing(report, tmp_path, scheme):
    flags = [f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"]
    assert browse(report, tmp_path, *flags) == ([], [])
    from matplotlib.image import imread

    corner = imread(tmp_path / "page.png")[5, 5, :3].mean()
    assert corner > 0.9 if scheme == "light" else corner < 0.2


def test_a_bad_page_would_log_and_request(tmp_path):
    """The check above can fail."""
    bad = tmp_path / "bad.html"
    bad.write_text(f"<!doctype html><title>bad</title><h1>{'bad ' * 400}</h1>" + HOSTILE)
    console, asked = browse(bad, tmp_path)
    assert "sample" in console[0] and asked == ["http://example.invalid/x.png"]


def test_the_file_has_no_external_links(report):
    html = report.read_text()
    tags = re.findall(r"<[^!][^>]*>", html)
    assert not [tag for tag in tags if re.match(r"<(script|img|link|iframe|object|embed|base|form|a)\b", tag)]
    links = [link for tag in tags for link in re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?([^"\')\s]+)', tag)]
    assert links and all(link.startswith("#") for link in links)
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style and "Content-Security-Policy" in html


def test_the_report_has_all_that_it_was_given(report):
    html = report.read_text()
    assert '<div class="figure">1.816</div>' in html and "1.05M" in html and "87.1 %" in html
    assert re.findall(r'width: ([\d.]+)%"></i><span[^>]*>([\d.]+)', html) == [
        ("100.0", "4.699"),
        ("60.8", "2.859"),
        ("42.8", "2.012"),
        ("38.6", "1.816"),
    ]
    assert '<span class="prompt">def main(argv):\n</span>    &#34;&#34;&#34;Return' in html
    assert "arguments.\u2400" in html and "été?" in html and "&lt;script&gt;" in html
    assert html.count("<svg") == 5 and f' stroke="{LIGHT["model"]}"' in html
    assert "<dt>started from</dt><dd>runs/b (run, step 200), digest 4bf9</dd>" in html
    assert "<dt>which started from</dt><dd>models/pythia (Hugging Face folder), digest 0f3a</dd>" in html
    assert html.count('<span class="prompt">') == 3 and "temperature 0.9, top-p 0.9" in html and "seed 2" in html
    words = "width 32, learned positions: 2 x pre-norm [LayerNorm, 4 heads of 8, biases, GELU (tanh) 128, biases]"
    assert words in html and "<dt>parameters</dt>" in html and "training FLOPs" in html
    assert '<dt title="exp(loss): the number of equally likely tokens with the same loss">perplexity</dt>' in html
    for text in ("learning_rate", "weight_decay", "Some Processor", "python -m xfresearch.evaluate --workdir runs/a"):
        assert text in html


def test_the_same_run_gives_the_same_bytes(report, tmp_path):
    arguments = dict(config=tiny_config(), machine={}, baselines=BASELINES)
    arguments |= dict(result={"bits_per_byte": 2.0}, samples=[], commands={}, lineage=[])
    first = write_report(tmp_path, **arguments).read_bytes()
    assert write_report(tmp_path, **arguments).read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]


def test_run_without_evaluation_or_baselines(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.write(1, "train", {"loss": 5.0})
    log.close()
    arguments = dict(machine={}, baselines={}, result={}, samples=[], commands={}, lineage=[])
    html = write_report(tmp_path, config=tiny_config(), **arguments).read_text()
    assert html.count("<svg") == 2 and 'class="figure"' not in html


def test_the_chart_of_the_busiest_expert(tmp_path):
    """One line per layer; an even load is 1."""
    log = MetricsLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.write(step, "train", {"router_load": {"main": [[0.5, 0.5], [1.0, 0.0]], "other": [[0.1 * step, 0.2, 0.2]]}})
    log.close()
    assert _busiest({"a": [[0.5, 0.5], [1.0, 0.0]], "b": [[0.1, 0.2, 0.2, 0.5]]}) == [1, 2, 2]
    arguments = dict(machine={}, baselines={}, result={}, samples=[], commands={}, lineage=[])
    html = write_report(tmp_path, config=tiny_config(), **arguments).read_text()
    assert html.count("<svg") == 2 and html.count(f' stroke="{LIGHT["training"]}"') == 3 and "Busiest expert" in html


@pytest.mark.parametrize(
    "value, text",
    [
        (1.81649, "1.816"),
        (1048576, "1.05M"),
        (21_000.0, "21k"),
        (9999, "9,999"),
        (5000.0, "5,000"),
        (0.00075, "7.5e-4"),
        (3e-5, "3e-5"),
        (0.0, "0"),
        (True, "True"),
        ("main", "main"),
        (("a", 1), "a, 1"),
        ((), "none"),
        (-20_000, "-20k"),
        (999_700, "1M"),
        (999_950_000.0, "1B"),
        (float("inf"), "inf"),
    ],
)
def test_short(value, text):
    assert short(value) == text


