"""Designs of studies: what is refused, and what is matched."""

import dataclasses
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.daily import daily
from tests.studies import tiny
from xfresearch.configs.studies.common import SIZES
from xfresearch.data.pipeline import Batches
from xfresearch.models import transformer
from xfresearch.options.comparing import fingerprint
from xfresearch.runtime.errors import UserError
from xfresearch.studies import allocation, design, matching, study_plan
from xfresearch.studies.allocation import TUNING_SEED, Cell, Trial
from xfresearch.studies.design import Study

FILE = "configs/studies/w_o.py:tiny"
STUDY = Study(
    question="Is a wide feed-forward layer better?",
    rule="It is, if the verdict is 'better'.",
    base="variants:tiny",
    sizes={"a": (), "b": ("model.width=64",)},
    arms={"base": (), "wide": ("model.blocks.main.feed_forward.hidden=256",)},
    baseline="base",
    rates=(1e-3, 1e-2),
    rate_runs=1,
    extensions=2,
    seeds=3,
)
CELL = Cell("a", "wide")
HIDDEN = "model.blocks.main.feed_forward.hidden"
DEEP = {"base": ("model.depth=1", f"{HIDDEN}=8"), "deep": ("model.depth=6",)}


def matched(study: Study, arm: str) -> matching.Matched:
    return matching.matched(study, Cell("a", arm), {})


def test_the_name_of_a_study_is_guessed_among_studies():
    with pytest.raises(UserError, match="no such file; did you mean 'studies/norms:tiny'.*studies/experts, "):
        design.read(["--config", "configs/studies/norm.py:tiny"])


def test_a_study_is_read_with_its_overrides():
    study = design.read(["--config", FILE, "--config.seeds=4", "--config.rates=(1e-3,2e-3)"])
    assert (study.seeds, study.rates, study.baseline) == (4, (1e-3, 2e-3), "no_residual_between")
    assert study.arms["fused_output"] == ("model.blocks.main.layout=fused_output",)


def test_the_studies_of_the_page_can_be_planned(tmp_path):
    snippets = re.findall(r"^```python\n(.*?)^```$", Path("docs/studies.md").read_text(), re.M | re.S)
    assert len(snippets) == 2
    for text in snippets:
        (tmp_path / "study.py").write_text(text)
        assert study_plan.make(design.read(["--config", str(tmp_path / "study.py")])).runs > 10


def test_two_arms_of_a_seed_read_the_same_batches_and_begin_with_the_same_values():
    """Arms with the same parameters. With other ones, the parameters that are drawn before the first other one are equal."""
    study = design.read(["--config", "configs/studies/activations.py:tiny"])
    configs = [replace(design.config_of(study, "tiny", arm), seed=3) for arm in ("relu", "swish", "swiglu")]
    first, *others = [[Batches(config).batch(step)["tokens"] for step in (0, 7)] for config in configs]
    assert all(np.array_equal(first, other) for other in others)
    relu, swish, swiglu = (transformer.init(config.model, jax.random.key(3)) for config in configs)
    assert jax.tree.all(jax.tree.map(np.array_equal, relu, swish))
    for name in ("embed", "head"):
        assert jax.tree.all(jax.tree.map(np.array_equal, relu.get(name, {}), swiglu.get(name, {})))
    attention = [params["blocks"]["main"]["attention"] for params in (relu, swiglu)]
    assert jax.tree.all(jax.tree.map(np.array_equal, *attention))


def test_the_page_has_every_key_with_its_default():
    rows = [line.split("|") for line in Path("docs/studies.md").read_text().splitlines() if line.startswith("| `")]
    told = {name: default.strip() for _, names, default, *_ in rows for name in re.findall(r"`(\w+)`", names)}
    needed = {name: "needed" for name in ("question", "rule", "base", "sizes", "arms", "baseline")}
    assert told == {name: f"`{value!r}`" for name, value in dataclasses.asdict(Study()).items()} | needed


def test_sizes_are_in_the_order_of_their_parameters():
    assert list(design.read(["--config", "configs/studies/w_o.py"]).sizes) == ["nano", "micro", "small"]


@pytest.mark.parametrize(
    "override, message",
    [
        ("baseline=fused_outptu", "baseline='fused_outptu' is not allowed: it must be one of .*did you mean 'fused_output'"),
        ("rates=(1e-2,1e-3)", r"rates=\(0.01, 0.001\) is not allowed: it must be two rates or more, each at least 5% above"),
        ("rates=(1e-3,1.001e-3)", r"rates=\(0.001, 0.001001\) is not allowed"),
        ("rates=(1e-3,1e999)", r"rates=\(0.001, inf\) is not allowed"),
        ("rates=(1e-3,1e-2,2e-2)", "rates=.* is not allowed: it must be rates with nearly equal ratios"),
        ("options=('data.cache_dir','steps=9')", "options='data.cache_dir' is not allowed: it must be KEY=VALUE, such as"),
        ("options=('config.steps=9',)", "options='config.steps=9' is not allowed: .* without 'config.'"),
        ("machine=('data.cache_dir',)", "machine='data.cache_dir' is not allowed: it must be KEY=VALUE, such as"),
        ("seeds=1", "seeds=1 is not allowed: it must be at least 2"),
        ("looks=(2,)", r"looks=\(2,\) is not allowed: it must be numbers of pairs from 2 to below config.seeds=2"),
        ("seeds=1001", "seeds=1001 is not allowed: it must be at least 2 and at most 1000"),
        ("match=parameter", "match='parameter' is not allowed: it must be one of 'flops', 'parameters', 'tokens'"),
        ("match=tokens", "solve=.* is not allowed: it must be '' with match='tokens'"),
        ("tune_at=('smal',)", r"tune_at='smal' is not allowed: it must be rungs, \(\) or some of tiny"),
        ("budgets=(20.0,10.0)", r"budgets=\(20.0, 10.0\) is not allowed: it must be numbers above 0 in ascending order"),
        ("match=seconds", "solve=.* is not allowed: it must be 'steps' with match='seconds'"),
        ("probes=('attention.',)", r"probes='attention.' is not allowed: it must be ANALYSIS.FIGURE, of one of attention, "),
        ("probes=('patching.x',)", r"probes='patching.x' is not allowed"),
        ("probes=('sinks',)", "probes='sinks' is not allowed: it must be one of copying, recall, exact_match, "),
        ("margin=0.0", "margin=0.0 is not allowed: it must be above 0"),
        ("question=", "question='' is not allowed"),
        ("solve_in.paralel=steps", "there is no key 'paralel'"),
        (
            "arms.fused_output=('optimizer.learning_rate=1',)",
            "arms.fused_output='optimizer.learning_rate=1' is not allowed: it must be another option: a study sets",
        ),
        ("options=('seed=1',)", "options='seed=1' is not allowed"),
        ("sed=3", "there is no key 'sed'; did you mean 'seeds'"),
    ],
)
def test_a_mistake_is_one_line(override, message):
    with pytest.raises(UserError, match=message):
        design.read(["--config", FILE, f"--config.{override}"])


def test_a_vocabulary_below_that_of_the_tokenizer_is_refused():
    with pytest.raises(UserError, match="config.model.vocab_size=200 is not allowed: it must be 0 or at least 257"):
        design.config_of(STUDY, "a", "wide", "model.vocab_size=200")


def test_the_baseline_is_not_solved_for(tmp_path):
    (tmp_path / "study.py").write_text(tiny.FILE.replace("    return", "    study.solve_in.base = 'steps'\n    return"))
    with pytest.raises(UserError, match="solve_in='base' is not allowed: it must be an arm beside base, whose"):
        design.read(["--config", str(tmp_path / "study.py")])


def test_arms_may_be_matched_to_another_arm_than_the_baseline():
    """So a study with another baseline has the same runs, and can reuse them."""
    arms = STUDY.arms | {"deep": ("model.depth=1",)}
    of_base = replace(STUDY, arms=arms, solve=HIDDEN, solve_in={"wide": ""}, budgets=(2.0, 4.0), options=("batch_size=4",))
    of_wide = replace(of_base, baseline="wide")
    same = replace(of_wide, matched_to="base")
    first, other, again = (matching.all_matched(each, {}) for each in (of_base, of_wide, same))
    assert {cell: each.config for cell, each in first.items()} == {cell: each.config for cell, each in again.items()}
    assert first[Cell("a-x2", "wide")].config.steps < other[Cell("a-x2", "wide")].config.steps  # it has more parameters
    assert (matching.scales(of_base, first) == matching.scales(same, again)).all()
    assert (matching.axes(of_base, first) == matching.axes(same, again)).all()
    assert "matched_to" not in design.described(of_base) and design.described(same)["matched_to"] == "base"
    with pytest.raises(UserError, match="matched_to='pre' is not allowed: it must be one of the arms, "):
        design.read(["--config", FILE, "--config.matched_to=pre"])


def test_a_cell_may_have_its_own_overrides():
    study = replace(STUDY, cells={"b/wide": ("model.depth=1",)})
    depths = {(size, arm): design.config_of(study, size, arm).model.depth for size in "ab" for arm in study.arms}
    assert depths == {("a", "base"): 2, ("a", "wide"): 2, ("b", "base"): 2, ("b", "wide"): 1}


def test_a_mistake_in_an_arm_names_the_arm():
    study = replace(STUDY, arms=STUDY.arms | {"odd": ("model.blocks.main.layot=parallel",)})
    with pytest.raises(UserError, match="arm odd at size b: config.model.blocks.main.layot=.*: there is no key 'layot'"):
        design.config_of(study, "b", "odd")
    allowed = "it must be an integer option of its config, such as 'steps'; study.solve_in.wide may be another one, or ''"
    with pytest.raises(UserError, match=f"arm wide at size a: config.solve='model.dtype' is not allowed: {allowed}"):
        matched(replace(STUDY, solve="model.dtype"), "wide")
    with pytest.raises(UserError, match="config.solve_in.wide='model.dtype' is not allowed"):
        matched(replace(STUDY, solve_in={"wide": "model.dtype"}), "wide")


@pytest.mark.parametrize(
    "line, message",
    [
        ("study.rates = 0.01", "rates=0.01 has the wrong type float: it must be tuple, at line 4 of study.py"),
        ("raise ValueError('boom')", "ValueError: boom, at line 4 of study.py"),
    ],
)
def test_a_mistake_in_the_file_is_its_last_line_and_its_place(tmp_path, line, message):
    file = tmp_path / "study.py"
    first = "from xfresearch.configs.studies import common"
    lines = [first, "def get_config():", "    study = common.base('tiny')", f"    {line}"]
    file.write_text("\n".join([*lines, ""]))
    with pytest.raises(UserError, match=message) as error:
        design.read(["--config", str(file)])
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize("match, solve", [("flops", "model.blocks.main.feed_forward.hidden"), ("flops", "steps")])
def test_arms_have_the_flops_of_the_baseline(match, solve):
    study = replace(STUDY, match=match, solve=solve, multiple=1)
    baseline, arm = (matched(study, name) for name in study.arms)
    assert baseline.solved == "" and baseline.mismatch == 0 and arm.solved.startswith(f"{solve}=")
    assert arm.training_flops / baseline.training_flops - 1 == pytest.approx(arm.mismatch)
    assert abs(arm.mismatch) < 0.03
    assert matched(replace(study, solve=""), "wide").mismatch > 0.1


def test_an_arm_that_costs_as_much_keeps_its_size():
    study = replace(STUDY, options=(f"{HIDDEN}=100",), solve=HIDDEN)
    same, half = ("model.blocks.main.feed_forward.kind=relu",), ("model.depth=1",)
    arm, other = (matched(replace(study, arms={"base": (), "other": each}), "other") for each in (same, half))
    assert arm.solved == f"{HIDDEN}=100" and arm.mismatch == 0
    assert int(other.solved.partition("=")[2]) > 200 and int(other.solved.partition("=")[2]) % 8 == 0


def test_parameters_are_matched_by_a_hidden_size():
    study = replace(STUDY, match="parameters", solve="model.blocks.main.feed_forward.hidden", multiple=1)
    arm = matched(study, "wide")
    assert arm.parameters == matched(study, "base").parameters and arm.mismatch == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"arms": STUDY.arms | {"same": ("log.every=7",)}}, "arm same at size a is the same as base"),
        ({"arms": STUDY.arms | {"short": ("sequence_length=16",)}}, "arm short at size a: config.sequence_length: .* text"),
        ({"arms": STUDY.arms | {"bpe": ("data.tokenizer=bpe",)}}, "arm bpe at size a: config.data.tokenizer: .* text"),
        ({"trend": "steps"}, "trend='steps' is not allowed: it must be 'parameters' or an option, above 0, that differs"),
        ({"options": ("evaluation.every=0",)}, "options='evaluation.every=0' is not allowed"),
        ({"options": ("evaluation.split=train",)}, "options='evaluation.split=train' is not allowed"),
        ({"solve": HIDDEN, "multiple": 7000, "solve_in": {}}, "set config.multiple below 7000, because .*=7000 is"),
        ({"solve": "model.width", "multiple": 7, "solve_in": {}}, r"\(config.solve tries multiples of config.multiple=7\)"),
        (
            {"arms": {"base": (), "wide": ("steps=24",)}, "match": "tokens", "solve_in": {}},
            "its tokens are .*: give all arms as many updates, and batches of one size, or set study.solve_in.wide = ''",
        ),
        (
            {"options": ("steps=5", "optimizer.warmup=0"), "solve": "steps", "solve_in": {}},
            "its flops are .*: give base more updates, because steps=4 is the nearest number, or set",
        ),
        (
            {"arms": DEEP | {"base": ("model.depth=6",), "deep": (f"{HIDDEN}=1",)}, "solve": HIDDEN, "solve_in": {}},
            f"{HIDDEN}=16 is not enough for the flops of base: config.solve tries no more than 16 times the arm's own",
        ),
        ({"solve": "seed", "solve_in": {}}, "arm wide at size a: seed cannot be solved for: it does not change the flops"),
        (
            {"solve_in": {}},
            r"arm wide at size a: its flops are \+.*% relative to those of base: set config.solve to an option",
        ),
        ({"arms": DEEP, "solve": HIDDEN, "solve_in": {}}, r"arm deep at size a: its flops are \+.*% relative"),
        ({"sizes": {"a": (), "b": ("steps=7",)}}, "trend='parameters' is not allowed: it must be 'parameters' or an option"),
        ({"options": ("start.path=runs/a",)}, "arm base at size a: config.start.path='runs/a' is not allowed: it must"),
        ({"machine": ("steps=7",)}, "machine='steps=7' is not allowed: it must be a path of this machine"),
    ],
)
def test_the_plan_refuses_designs_that_compare_nothing(change, message):
    study = {"sizes": {"a": (), "b": ("model.depth=3",)}, "solve_in": {"wide": ""}} | change
    with pytest.raises(UserError, match=message):
        study_plan.make(replace(STUDY, **study))


def test_labels_have_no_bits_per_byte():
    majority = ["--config", "configs/studies/norms.py:majority"]
    with pytest.raises(UserError, match="metric='bits_per_byte' is not allowed: it must be 'loss' or 'accuracy'"):
        study_plan.make(design.read([*majority, "--config.metric=bits_per_byte"]))
    with pytest.raises(UserError, match="probes='copying, recall' is not allowed: it must be probes that need no"):
        study_plan.make(design.read([*majority, "--config.probes=('copying','recall','sink')"]))


def test_names_are_those_of_directories():
    with pytest.raises(UserError, match="arms='a/b' is not allowed: it must be letters"):
        design.require_names(replace(STUDY, arms={"a/b": (), "base": ()}))


def test_an_arm_may_solve_for_another_option():
    study = replace(STUDY, solve="model.blocks.main.feed_forward.hidden", solve_in={"wide": "steps"})
    assert matched(study, "wide").solved.startswith("steps=")
    study = replace(study, solve_in={"wide": ""})
    assert matched(study, "wide").solved == ""


def test_a_budget_is_tokens_for_each_parameter_of_the_baseline():
    study = replace(STUDY, budgets=(0.5, 2.0), solve_in={"wide": ""})
    assert [rung.name for rung in design.rungs(study)] == ["a-x0.5", "a-x2", "b-x0.5", "b-x2"]
    result = matching.all_matched(study, {})
    for cell, each in result.items():
        baseline = result[Cell(cell.rung, "base")]
        ratio = matching.tokens(each.config) / baseline.parameters
        assert ratio == pytest.approx(0.5 if cell.rung.endswith("x0.5") else 2.0, rel=0.1)
    steps = {cell.rung: each.config.steps for cell, each in result.items()}
    assert steps["b-x2"] == pytest.approx(4 * steps["b-x0.5"], abs=2)
    assert matching.ladder(study, result).carry.tuned == (0, 1, 2, 3)


def test_a_size_of_the_further_ones_joins_the_ladder():
    study = replace(STUDY, more_sizes={"c": ("model.width=96",)})
    assert list(design.with_sizes(study, ["c", "a"]).sizes) == ["a", "b", "c"]
    with pytest.raises(UserError, match="--add-rung=d is not allowed: it must be one of config.more_sizes, c"):
        design.with_sizes(study, ["d"])


def test_the_time_is_that_of_the_runs_that_are_left():
    study = replace(STUDY, solve_in={"wide": ""}, sizes={"a": (), "b": ("model.depth=3",)})
    made = study_plan.make(study)
    left = made.ladder.expected({Trial(CELL, 1e-3, TUNING_SEED): 1.0})
    assert len(left) == 19
    hours = 19 * made.matched[CELL].config.steps / 3600
    seconds = dict.fromkeys(made.matched, 360.0)
    assert f"some {360 * hours:.1f} hours" in study_plan.time_line(made, seconds, left)
    assert "some 0.0 minutes" in study_plan.time_line(made, seconds, [])
    assert any(line.startswith("ladder     2 x 1: to say how far") for line in study_plan.lines(study, made, []))


FILES = [file for file in sorted(Path("configs/studies").glob("[!_]*.py")) if file.stem != "common"]
NAMED = [f"{file}:{size}" for file in FILES for size in SIZES]


OTHERS = "w_q.py:adamw", "w_q.py:merged", "w_q.py:one_head", "w_q.py:small", "w_o.py:layouts", "w_o.py:pre_norm"
OTHERS += "w_o.py:small", "w_o.py:small_pre_norm", "norms.py:small", "norms.py:majority", "memory.py:beside"
OTHERS += "activations.py:tuned", "lambda_layers.py:recall", "recent.py:differential", "experts.py:parameters"
OTHERS += ("experts.py:slots",)
OTHERS += tuple(f"playground.py:{task}" for task in ("mano", "lano", "brevo", "depo", "capo"))


def cases() -> list:
    """The default run has the tiny sizes. The sizes of the documents take longer to solve, and are in make long."""
    names = [*NAMED, *(f"configs/studies/{name}" for name in OTHERS)]
    return daily([name for name in names if name.endswith(":tiny")], names)


@pytest.mark.parametrize("name", cases())
def test_every_named_study_has_arms_of_equal_cost(name):
    study = design.read(["--config", name])
    for cell in allocation.cells(study):
        mismatch = matching.matched(study, cell, {}).mismatch
        if study.solve_in.get(cell.arm) == "":  # on purpose
            assert mismatch < 0 if cell.arm.endswith(("smaller", "published")) else 0 < mismatch < 0.35, cell
        else:
            assert abs(mismatch) < (0.35 if study.tiny else 0.04), cell


@pytest.mark.parametrize(
    "files, arms",
    [
        (("experts.py", "experts.py:slots"), {"experts": "experts"}),
        (("memory.py", "experts.py:slots"), {"all_attention": "slots"}),
        (("memory.py", "experts.py"), {"feed_forward": "dense"}),
        (("memory.py", "memory.py:beside"), {"many_beside": "many_beside", "all_attention": "all_attention"}),
        (("norms.py", "w_q.py"), {"layer": "learned"}),
        (("null.py", "w_q.py"), {"base": "learned"}),
        (("w_o.py", "w_o.py:pre_norm"), {arm: arm for arm in ("pre_norm", "fused_output", "fused_output_smaller")}),
        (("w_o.py:layouts", "activations.py"), {"pre_norm": "gelu"}),
        (("activations.py", "activations.py:tuned"), {"swiglu": "swiglu"}),
        (("recent.py", "experts.py:parameters"), {"softmax": "dense"}),
        (("lambda_layers.py", "activations.py"), {"attention": "gelu"}),
    ],
)
def test_arms_that_two_studies_share_are_trained_once(files, arms):
    first, second = (design.read(["--config", f"configs/studies/{file}"]) for file in files)
    names = [rung.name for rung in design.rungs(first)]
    rungs = [("length_128", "small")] if "length_128" in names else zip(names, names, strict=True)
    for pair in ((Cell(one, a), Cell(other, b)) for one, other in rungs for a, b in arms.items()):
        each = zip((first, second), pair, strict=True)
        assert len({fingerprint(matching.matched(study, cell, {}).config) for study, cell in each}) == 1, pair
