"""python -m xfresearch.plan without libtpu: shapes on an abstract mesh, GPUs by formula, the search, errors."""

import json
import os

import jax
import pytest

from tests.contracts.variants import ROOT
from xfresearch import plan
from xfresearch.planning import compiling, formula, plans, report, search, topologies, traced_memory
from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.config_files import parse
from xfresearch.runtime.errors import UserError
from xfresearch.sharding import capacity

LAYERS = ("scan", "unroll")
SPLASH = "--config.training.attention_kernel=splash"
CUDNN = ["--config.training.attention_kernel=cudnn", "--config.model.blocks.main.attention.head_size=256"]
CUDNN += ["--config.model.dtype=bfloat16"]
TINY = ["--config", f"{ROOT / 'configs/llama.py'}:tiny", "--config.model.vocab_size=264"]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Restores os.environ after each test, because the command sets variables for libtpu."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def run(capsys, *arguments: str) -> str:
    plan.main(list(arguments))
    return capsys.readouterr().out


def test_a_mesh_without_topology_is_checked_without_devices(capsys, tmp_path):
    out = run(capsys, *TINY, "--mesh", "fsdp=4,tensor=2", "--json", str(tmp_path / "plan.json"))
    written = json.loads((tmp_path / "plan.json").read_text())
    assert "fsdp=4, tensor=2" in out and "not compiled" in out
    assert written["mesh"] == {"data": 1, "fsdp": 4, "expert": 1, "tensor": 2, "context": 1}
    norms = 5 * 32  # sharded over fsdp only
    assert written["parts"]["parameters"] == 4 * (norms / 4 + (written["parameters"] - norms) / 8)
    assert written["parts"]["optimizer"] == 2 * written["parts"]["parameters"] + 4 * 10  # two moments, ten scalars


def test_a_model_with_two_stacks_is_checked_with_the_activations_of_both(monkeypatch):
    seen = []
    traced = traced_memory.kept_in_trace
    monkeypatch.setattr(traced_memory, "kept_in_trace", lambda *given: seen.append(given) or traced(*given))
    lengths = ["--config.source_length=24", "--config.sequence_length=20", "--config.model.vocab_size=264"]
    model = ["--config", f"{ROOT / 'configs/vanilla_2017.py'}:tiny", *lengths]
    config = parse([*model, "--config.mesh.fsdp=2", "--config.mesh.tensor=2"])
    plan = plans.check(config)
    assert plan["method"] == "checked" and plan["parameters"] == costs(config.model).parameters
    (jaxpr, repeats, mesh), both = seen[0], plan["parts"]["kept for the backward pass"]
    encoder, decoder = ({shape for _, shape, _ in traced(jaxpr, each, mesh)} for each in ([2], [2, 2]))
    assert repeats == [2, 2] and not any(", 20, " in shape for shape in encoder)
    assert any(", 20, 24]" in shape for shape in decoder)  # weights of cross-attention
    assert 0 < sum(size for *_, size in traced(jaxpr, [2], mesh)) < both


def test_saved_activations_of_unrolled_layers_are_not_reported_as_zero(capsys):
    out = {layers: run(capsys, *TINY, "--mesh", "fsdp=2", f"--config.training.layers={layers}") for layers in LAYERS}
    assert ["kept for the backward pass" in out[layers] for layers in LAYERS] == [True, False]


def test_a_mesh_without_topology_is_checked_with_tpu_kernels(capsys, monkeypatch):
    lowered = []
    trace = compiling.trace
    monkeypatch.setattr(compiling, "trace", lambda *arguments: lowered.append(trace(*arguments)) or lowered[0])
    run(capsys, *TINY, "--mesh", "fsdp=2", SPLASH)
    assert "splash_mha" in str(lowered[0][1].jaxpr) and "scan[" in str(lowered[0][1].jaxpr)  # scan, as on a TPU


def test_gpu_plans_use_kernels_that_the_gpu_supports(capsys):
    assert "formula, not compiled" in run(capsys, *TINY, "--topology", "h100:2", *CUDNN)


def test_gpus_are_planned_by_formula_and_the_plan_says_so(capsys, tmp_path):
    file = tmp_path / "plan.json"
    out = run(capsys, *TINY, "--topology", "h100:2x2", "--mesh", "fsdp=2", "--tokens", "1e6", "--json", str(file))
    written = json.loads(file.read_text())
    assert "formula, not compiled" in out and written["method"] == "formula" and written["fits"]
    rows = {(row["kind"], *row["axes"]) for row in written["collectives"]}
    assert rows == {("all-gather", "fsdp"), ("reduce-scatter", "fsdp"), ("all-reduce", "data")}
    assert written["flops"]["traced"] == written["model_flops"]
    slow, fast = written["step_seconds"]
    assert slow > fast and written["hours"][0] == pytest.approx(1e6 / 512 * slow / 3600)
    peak = 4 * 989.4e12 / 2  # :tiny computes in float32, which has half the peak on a GPU
    assert written["utilisation"] == [pytest.approx(written["model_flops"] / (peak * t)) for t in (slow, fast)]


@pytest.mark.parametrize(
    "utilisation, words",
    [
        ((0.649, 0.769), ["64.9 %", "at most 76.9 %"]),
        ((0.571, 1.02), ["57.1 %", "below the peak"]),
        ((0.998, 1.0), ["below the peak", "below the peak"]),
    ],
)
def test_a_utilisation_is_a_bound_below_the_peak(utilisation, words):
    assert report.bounds(utilisation) == words


def test_a_share_is_never_100_percent():
    assert [report.percent(share) for share in (0.9994, 0.9996, 1.0, 1.234)] == ["99.9 %", "all", "all", "123.4 %"]


@pytest.mark.parametrize(("between", "axis"), [("auto", "data"), ("data", "data"), ("fsdp", "fsdp")])
def test_hosts_communicate_along_the_axis_that_crosses_them(between, axis):
    machine = topologies.parse("h100:2x2")
    config = parse([*TINY, "--config.mesh.fsdp=2", f"--config.mesh.between={between}"])
    result = plans.formula_plan(config, machine, 1e12, topologies.gpus(machine))
    sent = {
        over: sum(row["sent"] for row in result["collectives"] if row["axes"] == [over]) for over in ("data", "fsdp")
    }
    assert sent["data"] and sent["fsdp"] and sent["data"] != sent["fsdp"]
    assert result["time"]["network"] == pytest.approx(sent[axis] / 5e10)


def test_hlo_needs_a_compiled_plan(tmp_path):
    with pytest.raises(UserError, match="--topology=h100:2: this machine does not have these GPUs"):
        plan.main([*TINY, "--topology", "h100:2", "--hlo", str(tmp_path / "step.txt")])
    assert not (tmp_path / "step.txt").exists()


def test_a_plan_that_does_not_fit_reports_by_how_much_and_what_to_try(capsys, tmp_path):
    big = ["--config", f"{ROOT / 'configs/llama.py'}", "--config.model.dtype=bfloat16"]
    with pytest.raises(SystemExit) as ended:
        plan.main([*big, "--topology", "h100:8", "--json", str(tmp_path / "plan.json")])
    out = capsys.readouterr().out
    assert ended.value.code == 1 and "DOES NOT FIT" in out
    assert "config.mesh.fsdp=8 instead of data" in out and "config.training.remat=full" in out
    written = json.loads((tmp_path / "plan.json").read_text())
    assert not written["fits"] and written["memory"]["total"] > written["memory"]["available"]


def test_the_search_ranks_plans_that_fit(capsys, tmp_path):
    out = run(capsys, *TINY, "--topology", "h100:2", "--search", "--json", str(tmp_path / "plan.json"))
    written = json.loads((tmp_path / "plan.json").read_text())
    ranks = [row["utilisation"][0] for row in written["tried"]]
    assert ranks == sorted(ranks, reverse=True) and len(ranks) == 3 * 3 * 3  # meshes, recomputation, batches
    assert {tuple(row["mesh"]) for row in written["tried"]} == {("data",), ("fsdp",), ("tensor",)}
    assert written["best"]["utilisation"][0] == ranks[0] and "the best:" in out


def test_every_mesh_of_the_search_uses_all_devices():
    config = compiling.prepare(parse(TINY))
    result = search.meshes(config, 16)
    assert len(result) == len({tuple(sizes.values()) for sizes in result})
    for sizes in result:
        product = 1
        for size in sizes.values():
            product *= size
        assert product == 16 and sizes["context"] == 1 and sizes["expert"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--topology NAME, --mesh AXIS=N,... or both"),
        *(
            ([*option.split(), "--mesh", "fsdp=2"], f"{option.split()[0]} needs --topology")
            for option in ("--search", "--slices 2", "--tokens 1e9", "--hlo step.txt")
        ),
        (["--topology", "h100:2", "--search", "--hlo", "step.txt"], "--hlo=step.txt is not allowed with --search"),
        (["--topology", "h100:2", "--search", "--mesh", "fsdp=2"], "--mesh=fsdp=2 is not allowed with --search"),
        (["--topology", "h100:2", "--slices", "0"], "--slices=0.* at least 1"),
        *(
            (["--topology", "h100:2", "--tokens", tokens], f"--tokens={tokens}.* more than 0")
            for tokens in ("0", "-5", "nan", "inf")
        ),
        (["--topology", "v5q:4x4"], "did you mean"),
        (["--topology", "", "--mesh", "fsdp=2"], "--topology= is not allowed: there is no such machine"),
        (["--mesh", "fsdp"], "'fsdp' must have the form AXIS=N"),
        (["--mesh", "fsdp=--2"], "'fsdp=--2' must have the form AXIS=N"),
        (["--mesh", "fsdp=2,data=2,fsdp=4"], "fsdp is given twice"),
        (["--mesh", "fdsp=2"], "did you mean 'fsdp'"),
        (["--mesh", "fsdp=-1"], "config.mesh.fsdp=-1.* at least 1 without --topology"),
        (
            ["--mesh", "fsdp=2", "--config.training.attention_kernel=cudnn"],
            "it needs a GPU, and the platform is tpu",
        ),
        (["--mesh", "fsdp=3"], "batch_size=8"),
        (["--mesh", "expert=2"], "config.mesh.expert=2"),
        (["--topology", "h100:8", "--mesh", "fsdp=5"], "mesh"),
        (["--topology", "h100:3"], "batch_size=8"),
        (["--topology", "h100:2x2", "--mesh", "tensor=4,data=1", "--config.mesh.between=data"], "multiple of 2 slices"),
        (["--topology", "h100:2", SPLASH], "config.training.attention_kernel='splash' is not allowed here: it needs a TPU"),
        (["--topology", "h100:2", "--search", SPLASH], "it needs a TPU, and the platform is gpu"),
        (["--topology", "a100:2", *CUDNN], "at most 128 numbers on this GPU"),
        (["--topology", "h100:2", "--config.model.param_dtype=float64"], "config.model.param_dtype='float64' is not"),
        (["--topology", "h100:2", "--config.model.vocab_size=256"], "vocab_size=256 .* 0 or at least 257, which"),
    ],
)
def test_errors_are_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as error:
        plan.main([*TINY, *arguments])
    assert "\n" not in str(error.value)


def test_a_vocabulary_of_labels_may_be_smaller_than_the_tokenizers():
    config = parse(["--config", f"{ROOT}/configs/brody_majority.py:tiny"])
    assert compiling.prepare(config).model.vocab_size == 8


@pytest.mark.parametrize("option", ["--hlo", "--json"])
def test_an_unwritable_file_is_reported_before_compilation(option, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(plan, "run", lambda *_: pytest.fail("the plan ran"))
    for path, message in ((tmp_path / "file" / "plan.txt", "cannot be written: "), (tmp_path, "it is a directory")):
        with pytest.raises(UserError) as error:
            plan.main([*TINY, "--topology", "h100:2", option, str(path)])
        assert message in str(error.value) and f"{option}={path}" in str(error.value) and "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_text_of_the_compiled_program_is_written_atomically(tmp_path):
    file = tmp_path / "made" / "step.txt"
    traced = jax.jit(jax.numpy.sin).trace(jax.ShapeDtypeStruct((4,), jax.numpy.float32))
    compiling.compile_step(traced, str(file))
    assert "ENTRY" in file.read_text() and list(file.parent.iterdir()) == [file]


def test_without_libtpu_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(topologies, "libtpu_installed", lambda: False)
    with pytest.raises(UserError, match="pip install 'xfresearch.tpu.', or in a checkout -r requirements/tpu.txt"):
        plan.main([*TINY, "--topology", "v5e:2x2"])
    assert (ROOT / "requirements/tpu.txt").exists()


def test_the_formula_has_the_collectives_of_each_axis():
    config = compiling.prepare(
        parse([*TINY[:1], f"{ROOT / 'configs/mixtral_8x7b.py'}:tiny", TINY[2], "--config.training.remat=full"])
    )
    sizes = {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2, "context": 2}
    result = formula.estimate_step(config, sizes)
    by_axes = {(c.kind, c.axes): c for c in result.collectives}
    rows, length, width, layers = 8 / 4, 64 / 2, 32, 2
    stream = rows * length * width * 4
    assert by_axes["all-to-all", ("expert",)].payload == 2 * stream  # two experts per token
    assert by_axes["all-to-all", ("expert",)].runs == 2 * 3 * layers  # there and back; three passes
    assert by_axes["all-reduce", ("tensor",)].payload == stream
    assert by_axes["all-gather", ("context",)].payload == rows * 64 * 2 * 2 * 8 * 4 / 2  # 2 key heads of size 8
    assert len(by_axes["all-gather", ("fsdp",)].group) == 2
    whole = sum(capacity.state_bytes(result.state).values())
    assert result.memory["parameters"] + result.memory["optimizer"] == whole


@pytest.mark.parametrize(
    ("name", "layout", "remat", "sums"),
    [
        ("llama", "pre_norm", "none", 2 + 2),
        ("llama", "pre_norm", "dots", 2 + 2),
        ("llama", "pre_norm", "full", 3 + 2),  # the last output of a layer is not recomputed
        ("gptj", "parallel", "none", 2),
        ("gptj", "parallel", "full", 2),
        ("gptj", "parallel_two_norms", "none", 2 + 2),
    ],
)
def test_the_formula_sums_outputs_over_tensor_as_often_as_a_compiled_step(name, layout, remat, sums):
    """The compiled step has 6 more sums: of the embedding and the loss."""
    options = [f"--config.training.remat={remat}", f"--config.model.blocks.main.layout={layout}"]
    config = compiling.prepare(parse([*TINY[:1], f"{ROOT}/configs/{name}.py:tiny", TINY[2], *options]))
    actual = formula.estimate_step(config, {"data": 1, "fsdp": 1, "expert": 1, "tensor": 2, "context": 1}).collectives
    assert sum(each.runs for each in actual if each.axes == ("tensor",)) == sums * config.model.depth


ATTENTION = "--config.model.blocks.main.attention."


@pytest.mark.parametrize("options", [["heads=4"], ["kv_heads=2"], ["kv_heads=1", "memory_slots=13"], ["sink=off_by_one"]])
def test_the_formula_saves_no_weights_of_attention(options):
    """Whatever the keys of the heads are: an activation with numbers for queries and keys grows with the length squared."""
    kept = []
    for length in (96, 192):
        overrides = [f"--config.sequence_length={length}", *(f"{ATTENTION}{option}" for option in options)]
        config = compiling.prepare(parse([*TINY, *overrides]))
        kept.append(formula.estimate_step(config, dict.fromkeys(("data", "fsdp", "expert", "tensor", "context"), 1)).kept)
    assert all("13]" not in shape for _, shape, _ in kept[0])
    assert sum(size for *_, size in kept[1]) < 2 * sum(size for *_, size in kept[0])


def test_the_formula_of_two_stacks_counts_the_encoder_and_the_attention_to_it():
    lengths = ["--config.source_length=24", "--config.sequence_length=24", "--config.model.vocab_size=264"]
    config = compiling.prepare(parse(["--config", f"{ROOT / 'configs/t5.py'}:tiny", *lengths]))
    result = formula.estimate_step(config, {"data": 1, "fsdp": 2, "expert": 1, "tensor": 2, "context": 2})
    assert result.flops == compiling.traced_flops(config)
    shapes = [shape for _, shape, _ in result.kept]
    cross = [shape for shape in shapes if ", 24, 23]" in shape]  # weights that the plain kernel saves
    assert cross and not any(", 24, 24]" in shape or ", 23, 23]" in shape for shape in shapes)
    by_source = {(each.kind, each.axes, each.source): each for each in result.collectives}
    stream = config.batch_size / 2 * 24 / 2 * config.model.width * 4
    for name, kind in (("outputs of attention", "encoder.main"), ("gradient of the source", "main")):
        assert by_source["all-reduce", ("tensor",), f"{kind}: {name}"].payload == stream
    assert {"main: keys and values", "encoder.main: keys and values"} <= {source for _, _, source in by_source}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_formula_has_the_flops_of_the_traced_step(optimizer):
    config = compiling.prepare(parse([*TINY, f"--config.optimizer.kind={optimizer}"]))
    result = formula.estimate_step(config, {"data": 2, "fsdp": 2, "expert": 1, "tensor": 1, "context": 1})
    passes, update = (work.flops for work in result.works)
    assert result.flops == compiling.traced_flops(config) == 4 * passes + 2 * update
    assert (update > 0) == (optimizer == "muon")


def test_commands_start_on_the_cpu_if_libtpu_is_installed_and_no_tpu_is_attached(tmp_path):
    """JAX_PLATFORMS is set before JAX is imported. test_tpu.py checks with the real libtpu that nothing is logged."""
    import subprocess
    import sys

    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").write_text("")
    code = "from xfresearch.runtime.command import run; import os; run(lambda _: print(os.environ['JAX_PLATFORMS']), [])"
    kept = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS" and not name.startswith("TPU")}
    kept["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=kept, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cpu\n", "")
