"""Plans compiled for TPUs, without a TPU. The tests need libtpu (`make libtpu`) and are skipped without it."""

import json
import os
import subprocess
import sys

import pytest

from tests.contracts.variants import ROOT
from xfresearch.planning import topologies

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not topologies.libtpu_installed(), reason="libtpu is not installed: make libtpu"),
]
TINY = f"{ROOT / 'configs/llama.py'}:tiny"


def start(tmp_path, name: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "xfresearch.plan", "--json", str(tmp_path / f"{name}.json"), *arguments]
    kept = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=kept, **pipes)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=580)
    return process.returncode, out, error


def test_two_plans_compile_at_the_same_time(tmp_path):
    both = {"v5e": ("v5e:2x2", "fsdp=4"), "v5p": ("v5p:2x2x1", "fsdp=2,tensor=2")}
    sizes = ("--config.model.vocab_size=264", "--config.sequence_length=128")
    running = {
        name: start(tmp_path, name, "--config", TINY, "--topology", topology, "--mesh", mesh, *sizes)
        for name, (topology, mesh) in both.items()
    }
    for name, process in running.items():
        code, out, error = finish(process)
        assert (code, error) == (0, ""), error[-2000:]
        plan = json.loads((tmp_path / f"{name}.json").read_text())
        assert plan["method"] == "compiled" and plan["fits"] and "utilisation" in out
        assert plan["flops"]["traced"] == plan["model_flops"]
        assert plan["unknown_kernels"] == []
        # Splash attention computes the logits three times (here no block is fully masked), and the compiler turns the
        # smallest products into sums.
        assert 0.9 < plan["flops"]["compiled"] / plan["flops"]["traced"] < 1.7
        rows = {(row["kind"], *row["axes"]): row for row in plan["collectives"]}
        assert rows["all-gather", "fsdp"]["count"] > 0
        assert sum(row["share"] for row in plan["collectives"]) == pytest.approx(1)
        slow, fast = plan["step_seconds"]
        assert 0 < fast <= slow
        parts = plan["memory"]["parts"]
        assert sum(parts.values()) == pytest.approx(plan["memory"]["total"])
        assert parts["parameters"] == pytest.approx(plan["parameters"] * 4 / 4, rel=0.1)  # float32, over 4 devices


def test_slices_communicate_along_the_axis_that_crosses_them(tmp_path):
    sizes = ("--mesh", "fsdp=4", "--config.model.vocab_size=264", "--config.sequence_length=128")
    code, _, error = finish(start(tmp_path, "two", "--config", TINY, "--topology", "2x v5p:2x2x1", *sizes))
    assert (code, error) == (0, ""), error[-2000:]
    plan = json.loads((tmp_path / "two.json").read_text())
    over = [row for row in plan["collectives"] if "data" in row["axes"]]
    assert [(row["kind"], row["axes"]) for row in over] == [("all-reduce", ["data"])]
    assert plan["time"]["network"] > 0


def test_a_plan_that_does_not_fit_is_reported_without_a_crash(tmp_path):
    big = ("--config", str(ROOT / "configs/llama.py"), "--config.model.dtype=bfloat16", "--mesh", "fsdp=4")
    code, out, error = finish(start(tmp_path, "big", *big, "--topology", "v5e:2x2"))
    assert (code, error) == (1, ""), error[-2000:]
    plan = json.loads((tmp_path / "big.json").read_text())
    over = (plan["memory"]["total"] - plan["memory"]["available"]) / 2**30
    assert not plan["fits"] and f"DOES NOT FIT: {over:.2f} GiB more" in out
    assert plan["memory"]["available"] == 15.75 * 2**30
    assert plan["memory"]["parts"]["parameters"] == pytest.approx(plan["parameters"])  # 4 bytes over 4 devices
    assert "config.training.remat=full" in out and "kept for the backward pass" in out


@pytest.mark.parametrize(
    ("name", "devices", "kind"),
    [
        ("v4-8", 4, "TPU v4"),
        ("v5litepod-16", 16, "TPU v5 lite"),
        ("v5p-16", 8, "TPU v5"),
        ("v6e-8", 8, "TPU v6 lite"),
        ("tpu7x:2x2x1", 8, "TPU7x"),
        ("v6e:1x1", 1, "TPU v6 lite"),
        ("2x v5p:2x2x1", 8, "TPU v5"),
    ],
)
def test_devices_of_every_generation(name, devices, kind):
    code = (
        "import sys; from xfresearch.planning import topologies as t; t.set_environment();"
        "found = t.tpu_devices(t.parse(sys.argv[1])); print(len(found), found[0].device_kind)"
    )
    done = subprocess.run([sys.executable, "-c", code, name], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{devices} {kind}\n", done.stderr[-2000:]


def test_other_commands_start_on_the_cpu_without_output():
    code = "from xfresearch.runtime.command import run; run(lambda _: print(__import__('jax').default_backend()), [])"
    kept = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS" and not name.startswith("TPU")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=kept, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cpu\n", "")
