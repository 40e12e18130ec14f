"""What one GPU is asked: rows in their order, each in its own process, and a file that is whole after every row."""

import json
import sys
from xml.etree import ElementTree

import pytest

from xfresearch import bench
from xfresearch.benchmarks import decode, gpu, gpu_rows
from xfresearch.benchmarks.flags import read
from xfresearch.runtime.errors import UserError
from xfresearch.training.timing import random_batch

HERE = {"commit": "c", "machine": {"devices": "1 x GPU", "backend": "gpu"}}
DEVICE = {"status": "ok", "seconds": 1.0, "words": "", "figures": {"environment": HERE, "missing": {}}}
DONE = {"status": "ok", "seconds": 5.0, "words": "done"}


def test_the_command_runs_on_a_cpu(tmp_path, capsys):
    """The whole path with small sizes: trained, evaluated, generated, stopped, resumed; what needs a GPU says so."""
    path = tmp_path / "gpu.json"
    words = ["--tiny", "--only", "train_no_query,kernel_tests", "--row-seconds", "500", "--seconds", "900"]
    bench.main(["gpu", *words, "--json", str(path)])
    written = json.loads(path.read_text())
    assert written["commit"] and written["machine"]["backend"] == "cpu" and written["versions"]["jax"]
    assert list(written["rows"]) == ["device", "kernel_tests", "train_no_query"]
    row = written["rows"]["train_no_query"]
    assert row["status"] == "ok", row
    figures = row["figures"]
    assert figures["resumed differs"] == 0 and 0 < figures["bfloat16 differs"] < 2e-2
    assert all(len(losses) == 20 for losses in figures["losses"].values())
    assert written["rows"]["kernel_tests"] | {"words": ""} == {"status": "not run", "seconds": 0.0, "words": ""}
    assert "it needs a GPU, and this is a cpu" in capsys.readouterr().out


@pytest.mark.long
def test_every_row_of_a_cpu_is_ok(tmp_path):
    path = tmp_path / "gpu.json"
    bench.main(["gpu", "--tiny", "--row-seconds", "900", "--seconds", "5000", "--json", str(path)])
    for name, row in json.loads(path.read_text())["rows"].items():
        assert row["status"] == ("not run" if gpu.ROWS[name].gpu else "ok"), row


def test_a_row_that_takes_too_long_is_stopped_with_its_processes(tmp_path):
    child = "import subprocess, sys, time; subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])"
    outcome = gpu.started([sys.executable, "-c", child], tmp_path / "row.json", 1.0)
    assert outcome["status"] == "stopped" and outcome["words"] == "not done after 1 s" and outcome["seconds"] < 20


@pytest.mark.parametrize(
    "program, status, words",
    [
        ("raise SystemExit('error: no memory')", "failed", "error: no memory"),
        ("json.dump({'words': 'fine'}, file)", "ok", "fine"),
        ("json.dump({'words': 'fine', 'problems': ['a', 'b']}, file)", "failed", "a; b"),
        ("json.dump({'rows': [{'error': 'losses differ'}]}, file)", "failed", "losses differ"),
    ],
)
def test_the_outcome_of_a_row(tmp_path, program, status, words):
    path = tmp_path / "row.json"
    opened = f"import json; file = open({str(path)!r}, 'w')\n" if "file" in program else ""
    outcome = gpu.started([sys.executable, "-c", opened + program], path, 60)
    assert (outcome["status"], outcome["words"]) == (status, words)
    assert ("log" in outcome) == (status == "failed")


@pytest.mark.parametrize(
    ("cases", "code", "problems"),
    [
        ('<testcase name="a"/>', 0, []),
        ('<testcase name="a"><failure/></testcase>', 1, ["failed: a"]),
        ('<testcase name="tests.a"><error/></testcase>', 2, ["failed: tests.a"]),  # of an import
        ('<testcase name="a"><skipped/></testcase>', 0, ["no test ran"]),
        ('<testcase name="a"/>', 3, ["pytest ended with 3"]),
    ],
)
def test_kernel_tests_that_could_not_start_have_failed(cases, code, problems):
    counts = " ".join(f'{name}="{cases.count("<" + tag)}"' for name, tag in (("skipped", "skipped"), ("errors", "error")))
    tests = ElementTree.fromstring(f'<testsuites><testsuite tests="1" {counts}>{cases}</testsuite></testsuites>')
    assert gpu_rows.of_tests(tests, code)["problems"] == problems


def test_the_file_is_whole_after_every_row_and_late_rows_are_left_out(tmp_path, monkeypatch, capsys):
    """The second row begins after the time is over."""
    path, seen, clock = tmp_path / "gpu.json", [], iter((0.0, 1.0, 2.0, 11.0, 12.0))

    def started(command, file, seconds):
        seen.append([*json.loads(path.read_text())["rows"]] if path.exists() else [])
        return DEVICE if "device" in command else DONE

    monkeypatch.setattr(gpu, "started", started)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(clock))
    bench.main(["gpu", "--seconds", "10", "--only", "update_gpt2,kernel_tests", "--json", str(path)])
    assert seen == [[], ["device"]]
    rows = json.loads(path.read_text())["rows"]
    assert rows["update_gpt2"] == DONE and rows["kernel_tests"]["words"] == "the 10 seconds of --seconds are over"


@pytest.mark.parametrize("commit, kept", [("c", True), ("other", False)])
def test_rows_of_the_same_commit_are_kept(tmp_path, commit, kept):
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(HERE | {"commit": commit, "rows": {"killed": DONE, "train_moe": DONE}}))
    late = {"status": "not run", "seconds": 0.0, "words": "late"}
    gpu.write(str(path), {"device": DEVICE, "train_gpt2": DONE, "train_moe": late})
    rows = json.loads(path.read_text())["rows"]
    assert list(rows) == ["device", "train_gpt2", "train_moe", *(["killed"] if kept else [])]
    assert rows["train_moe"] == (DONE if kept else late)


def test_a_device_that_fails_leaves_the_other_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "started", lambda *_: {"status": "failed", "seconds": 1.0, "words": "no driver"})
    bench.main(["gpu", "--only", "killed", "--json", str(tmp_path / "gpu.json")])
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert rows["device"]["words"] == "no driver" and rows["killed"]["words"] == "the row device failed"


@pytest.mark.parametrize("flags, limits", [([], [60, 200, 150]), (["--row-seconds", "7"], [7, 7, 7])])
def test_rows_have_limits_of_their_own(tmp_path, monkeypatch, flags, limits):
    seen = []
    monkeypatch.setattr(gpu, "started", lambda command, file, seconds: seen.append(seconds) or DEVICE)
    only = ["--only", "update_gpt2,kernel_tests", "--seconds", "999"]
    bench.main(["gpu", *only, *flags, "--json", str(tmp_path / "gpu.json")])
    assert seen == limits


def test_rows_and_their_names(tmp_path, monkeypatch, capsys):
    bench.main(["gpu", "--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(gpu.ROWS) and all(" s  " in line for line in lines)
    said = dict(zip(gpu.ROWS, lines, strict=True))
    assert said["update_gpt2"].split()[1] == "200" and said["update_gpt2"].endswith("; on a GPU")
    assert said["train_gpt2"].split()[1] == "60" and not said["train_gpt2"].endswith("on a GPU")
    with pytest.raises(UserError, match="--only=train_gtp2 is not allowed.*did you mean 'train_gpt2'"):
        bench.main(["gpu", "--only", "train_gtp2", "--json", str(tmp_path / "gpu.json")])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="at the root of a checkout"):
        bench.main(["gpu", "--json", str(tmp_path / "gpu.json")])


def test_words_of_figures():
    first = {"config": "a", "tokens/s": 1000.0, "MFU": 0.25, "memory_bytes": 2e9}
    peer, other = {"config": "torch_compile", "ratio": 1.25}, {"config": "b", "ratio": 0.5}
    words = gpu.words_of({"rows": [first, peer, other], "grow": "length", "exponent": 0.5, "expected_exponent": 0.4})
    assert words == (
        "1,000 tokens/s, MFU 0.250, 2.0 GB; 0.80 of torch_compile; b 0.50 as fast; time as length^0.50, FLOPs ^0.40"
    )
    decoded = {"rows": [{"tokens/s": 300.0, "floors": 1.5}, {"model": "transformers_static", "ratio": 0.5}]}
    words = "300 tokens/s, 1.5 times the memory-bound floor; 2.00 times as fast as transformers_static"
    assert gpu.words_of(decoded) == words
    assert gpu.words_of({"row": {"ratio": 0.987}}) == "0.987 of bare updates"


def test_the_page_asks_for_rows_that_exist():
    from docs.performance import GOALS

    elsewhere = {"all", "ladder"}  # not rows of this command
    assert {row for *_, row in GOALS} - elsewhere <= {*gpu.ROWS}


def test_configs_of_the_rows_can_be_read():
    """Of real sizes: they are not run here."""
    from xfresearch.benchmarks.gpu_rows import REAL, arguments_of

    for name in REAL:
        given = arguments_of(name, False)
        assert read(given[1], given[2:]).steps == 20
    for row in gpu.ROWS.values():
        if row.command[:2] == ("xfresearch.bench", "update"):
            options = bench.parse([str(word) for word in row.command[1:]])
            assert min(read(name, options.overrides).batch_size for name in options.config) >= 16
            assert options.rounds == 10
        if row.command[:2] == ("xfresearch.bench", "decode"):
            options = bench.parse([str(word) for word in row.command[1:]])
            config = read(options.config[0], options.overrides)
            assert not options.against or config.model.dtype == "float32" and options.against in decode.TRANSFORMERS
            assert options.json == "{figures}" and config.model.vocab_size == {768: 50_257, 2048: 32_000}[config.model.width]


def test_biased_attention_is_beside_rope_and_beside_documents():
    """Whose random batch has several of them."""
    options = bench.parse([str(word) for word in gpu.ROWS["update_biased"].command[1:]])
    first, second = (read(name, options.overrides) for name in options.config[:2])
    assert {each.model.blocks["main"].attention.position for each in (first, second)} == {"rope"}
    assert [each.data.packing for each in (first, second)] == ["stream", "documents"]
    batch = random_batch(second)
    assert set(batch["segments"][0]) == {1, 2, 3} and batch["positions"][0].max() == 341
    assert set(random_batch(first)["segments"][0]) == {1} and random_batch(first)["positions"][0].max() == 1023
