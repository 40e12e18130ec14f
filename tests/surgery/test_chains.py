"""Chains of conversions, the command, and what a certificate refuses."""

import json
from dataclasses import replace

import pytest

import xfresearch as xf
from tests.surgery.comparing import assert_exact
from tests.tiny_runs import make_run, tiny_model
from xfresearch import command, convert, surgery
from xfresearch.errors import UserError
from xfresearch.surgery import conversion, running


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "a", steps=(10,))


def test_a_chain_has_one_certificate_with_a_control_for_each_step(run, tmp_path, capsys):
    new = tmp_path / "new"
    convert.main(["fold_norm,merge_query_key", str(run), str(new), "--json", str(tmp_path / "found.json")])
    found = json.loads((new / "certificate.json").read_text())
    assert found == json.loads((tmp_path / "found.json").read_text())
    assert found["exact"] and found["conversions"] == ["fold_norm", "merge_query_key"] and len(found["controls"]) == 2
    assert "fold_norm, merge_query_key" in capsys.readouterr().out
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
        (["untie", "{run}", "{new}", "--layers", "x"], "x is not allowed: it must be numbers of layers such as 0,2"),
        (["fold_norm", "{run}", "{new}", "--layers", "2"], "layers=2 is not allowed: this model has layers 0 to 1"),
        (["absorb_value_output", "{run}", "{new}", "--gauge", "x"], "invalid choice: 'x'"),
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
        running.convert(tiny_model(), [running.Step(wrong)])


def test_a_control_that_sees_nothing_is_refused():
    idle = conversion.Conversion("idle", "nothing", "always", "with nothing", lambda network, layers, broken: network)
    with pytest.raises(surgery.Refused, match="idle: the control .* equal logits prove nothing"):
        running.convert(tiny_model(), [running.Step(idle)])


def test_untie():
    assert not assert_exact(tiny_model(), "untie").tie_embeddings
    with pytest.raises(surgery.Refused, match="the output head is not tied"):
        surgery.untie(tiny_model("llama"))
