"""Chains of conversions, the command, and what a certificate refuses."""

import json
import math
from dataclasses import replace

import pytest

import xfresearch as xf
from tests.surgery.comparing import assert_exact, changed
from tests.tiny_runs import make_run, tiny_model
from xfresearch import convert, surgery
from xfresearch.runtime import command
from xfresearch.runtime.errors import UserError
from xfresearch.surgery import certificate as certificate_module
from xfresearch.surgery import conversion, converting
from xfresearch.surgery.network import take_apart


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "a", steps=(10,))


def test_a_chain_has_one_certificate_with_a_control_for_each_step(run, tmp_path, capsys):
    new = tmp_path / "new"
    convert.main(["fold_norm,merge_query_key", str(run), str(new), "--json", str(tmp_path / "found.json")])
    written = json.loads((new / "certificate.json").read_text())
    assert written == json.loads((tmp_path / "found.json").read_text())
    assert written["exact"] and written["conversions"] == ["fold_norm", "merge_query_key"] and len(written["controls"]) == 2
    text = capsys.readouterr().out
    assert "fold_norm, merge_query_key" in text and "all 257 tokens, positions 0 to 63, " in text
    assert "the same with parameters rounded to float32" in text
    assert written["relative"] < 1e-12 < 1e-9 < written["rounded"]["float32"] < 1e-4 and written["seconds"] > 0
    lm = xf.load(new)
    assert lm.config.blocks["main"].attention.query == "merged" and lm.step == 10
    assert abs(lm([[1, 2, 3]]) - xf.load(run)([[1, 2, 3]])).max() < 1e-3


def test_a_refused_conversion_writes_nothing(tmp_path, capsys):
    run = make_run(tmp_path / "llama", "llama", steps=(10,))
    with pytest.raises(SystemExit) as stopped:
        command.run(convert.main, ["fold_norm,merge_query_key", str(run), str(tmp_path / "new")])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith("error: merge_query_key: layer 0: x W_Q R(l - s)")
    assert not (tmp_path / "new").exists()


def test_a_dry_run_of_all_conversions(run, capsys):
    convert.main(["--dry-run", str(run)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*surgery.CONVERSIONS]
    assert all(" applies" in line or " refused: " in line for line in lines)


def test_a_dry_run_names_the_result(run, capsys):
    convert.main(["merge_query_key", str(run), "--dry-run", "--layers", "1"])
    assert "1 x pre-norm [LayerNorm, 4 heads of 8, biases, query='merged'" in capsys.readouterr().out


def test_the_list_has_every_conversion(capsys):
    convert.main(["--list"])
    out = capsys.readouterr().out
    assert all(f"{name}" in out and each.conditions in out for name, each in surgery.CONVERSIONS.items())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["fold_nrm", "{run}", "{new}"], "fold_nrm is not a conversion; did you mean 'fold_norm'"),
        (["untie", "{run}"], "NEW_WORKDIR is missing"),
        (["untie", "{run}", "{run}"], "exists"),
        (["untie", "{run}", "{new}", "--dry-run"], "is not allowed with --dry-run, which writes nothing"),
        (["untie", "{run}", "--dry-run", "--json", "x.json"], "x.json is not allowed with --dry-run"),
        (["untie", "{run}", "{new}", "--layers", "x"], "x is not allowed: it must be numbers of layers such as 0,2"),
        (["fold_norm", "{run}", "{new}", "--layers", "2"], "layers=2 is not allowed: this model has layers 0 to 1"),
        (["absorb_value_output", "{run}", "{new}", "--gauge", "x"], "--gauge: "),
    ],
)
def test_mistakes_are_one_line(run, tmp_path, capsys, arguments, text):
    with pytest.raises(SystemExit) as stopped:
        command.run(convert.main, [each.format(run=run, new=tmp_path / "new") for each in arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and text in error
    assert not (tmp_path / "new").exists()


def test_every_conversion_is_a_function():
    for name, each in surgery.CONVERSIONS.items():
        assert getattr(surgery, name).__name__ == name and each.about in getattr(surgery, name).__doc__


def test_an_option_that_no_step_has_is_refused():
    with pytest.raises(UserError, match="rank=2 is not allowed: untie has no such option"):
        surgery.untie(tiny_model(), rank=2)


@pytest.mark.parametrize(
    ("name", "options", "allowed"),
    [
        ("centre", {"width": "les_one"}, "'same' or 'less_one'"),
        ("widen", {"hidden": "128"}, "of type int"),
        ("upcycle", {"noise": True}, "of type float"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused(name, options, allowed):
    ((key, value),) = options.items()
    with pytest.raises(UserError, match=f"^{key}={value!r} is not allowed with {name}: it must be {allowed}$"):
        getattr(surgery, name)(tiny_model(), **options)


def test_parameters_that_do_not_match_the_config_are_refused():
    lm = tiny_model()
    lm.params["embed"] = {"table": lm.params["embed"]["table"][:-1]}
    with pytest.raises(UserError, match=r"'embed/table' is an array \(256, 32\), and the config needs .* \(257, 32\)"):
        surgery.untie(lm)


def test_a_conversion_that_changes_the_function_is_refused(monkeypatch):
    """An error in the algebra: the certificate names the first tap that differs."""
    wrong = replace(surgery.CONVERSIONS["merge_query_key"])
    object.__setattr__(wrong, "convert", lambda network, layers, broken: _merge(network, layers, broken=True))
    _merge = surgery.CONVERSIONS["merge_query_key"].convert
    with pytest.raises(surgery.Refused, match="logits differ by .* they first differ at blocks.0.attention"):
        converting.convert(tiny_model(), [converting.Step(wrong)])


def test_a_control_that_sees_nothing_is_refused():
    with pytest.raises(surgery.Refused, match="idle: the control .* equal logits prove nothing"):
        converting.convert(tiny_model(), [idle("idle")])


def idle(name: str, approximate: bool = False) -> converting.Step:
    """A step that changes nothing."""
    parts = (name, "nothing", "always", "with nothing", lambda network, layers, broken: network)
    return converting.Step(conversion.Conversion(*parts, approximate=approximate))


def test_exact_steps_beside_an_approximation_are_refused_if_they_differ(monkeypatch):
    parts = []

    def certify(certificate, *others):
        certificate.differences = {"random tokens": {"absolute": 0.5, "relative": 0.5}}
        certificate.controls = {"all": 1.0}
        parts.append(certificate.conversions)

    monkeypatch.setattr(converting, "certify", certify)
    a, b, c, rough = idle("a"), idle("b"), idle("c"), idle("rough", approximate=True)
    _, certificate = converting.convert(tiny_model(), [rough])
    assert certificate.approximate and parts == [["rough"]]
    with pytest.raises(surgery.Refused, match="^a, b: logits differ by 5.0e-01 relative"):
        converting.convert(tiny_model(), [a, b, rough, c])
    monkeypatch.setattr(certificate_module, "BOUND", 1.0)
    parts.clear()
    _, certificate = converting.convert(tiny_model(), [a, b, rough, c])
    assert parts == [["a", "b", "rough", "c"], ["a", "b"], ["c"]]
    assert [*certificate.figures] == [f"difference of logits, {name} alone" for name in ("a, b", "c")]


def test_an_approximation_that_is_not_finite_is_refused(monkeypatch):
    def certify(certificate, *others):
        certificate.differences = {"random tokens": {"absolute": math.nan, "relative": math.nan}}

    monkeypatch.setattr(converting, "certify", certify)
    with pytest.raises(surgery.Refused, match="^rough: the comparison .random tokens. is not finite"):
        converting.convert(tiny_model(), [idle("rough", approximate=True)])


@pytest.mark.parametrize("place", ["differences", "controls"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_comparison_that_is_not_finite_is_refused(place, number):
    """Python's max and min lose a NaN that is not the first one."""
    result = certificate_module.Certificate(["a"], False)
    result.differences = {name: {"relative": 1e-16} for name in ("random tokens", "with the cache")}
    result.controls = {"first": 0.5, "second": 0.5}
    assert result.exact
    if place == "differences":
        result.differences["with the cache"]["relative"] = number
    else:
        result.controls["second"] = number
    assert place == "controls" or not result.relative <= 1
    name = "with the cache" if place == "differences" else "second"
    assert not result.exact and converting._why(result) == (
        f"a: the comparison ({name}) is not finite in float64: it proves nothing"
    )


@pytest.mark.parametrize(
    ("options", "names", "arguments"),
    [
        ({"kv_heads": 2}, "expand_groups,absorb_value_output", {"gauge": "qr"}),
        ({}, "stack,unstack", {}),
        ({"sink": "learned"}, "sink_to_slot,slot_to_sink", {}),
    ],
)
def test_a_control_needs_no_later_step(options, names, arguments):
    """A later step may refuse what a broken step makes: no terms of refusal in the controls."""
    lm = changed(**{"bias": "()"} | options)
    for control in converting._controls(take_apart(lm.config, lm.params), surgery.chain(names, options=arguments)).values():
        assert control.params(0)


def test_layers_are_converted_once_and_mistakes_are_named():
    lm = changed(bias="()")
    network = take_apart(lm.config, lm.params)
    assert len(surgery.CONVERSIONS["stack"](network, (1, 1)).layers) == 3
    with pytest.raises(surgery.Refused, match="all layers add to one residual stream"):
        surgery.CONVERSIONS["centre"](network, (0, 0))
    for layers, text in (((), r"layers=\(\)"), ((0, -1), "layers=-1")):
        with pytest.raises(UserError, match=f"^{text} is not allowed: this model has layers 0 to 1"):
            surgery.CONVERSIONS["stack"](network, layers)


def test_untie():
    assert not assert_exact(tiny_model(), "untie").tie_embeddings
    with pytest.raises(surgery.Refused, match="the output head is not tied"):
        surgery.untie(tiny_model("llama"))
