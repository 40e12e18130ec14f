"""The wording of errors, once for each form. Other tests assert the key, the value and what is allowed, not the form."""

import re

import pytest

from tests.tiny_runs import tiny_model
from xfresearch import evaluate, plan
from xfresearch.interop.families import get_family
from xfresearch.run_config.config_files import parse
from xfresearch.runtime import command
from xfresearch.runtime.errors import MISTAKE, UserError, require_new
from xfresearch.training import pretrained
from xfresearch.training.fork import check_fork

GPT2 = "--config=configs/gpt2.py:tiny"
STARTS = "--config.start.path=runs/a"


@pytest.mark.parametrize(
    "mistake, text",
    [
        (lambda: parse([GPT2, "--config.steps=-1"]), "config.steps=-1 is not allowed: it must be at least 1"),
        (
            lambda: parse([GPT2, "--config.model.final_norm=lyaer"]),
            "config.model.final_norm='lyaer' is not allowed: it must be one of .*; did you mean 'layer'[?]",
        ),
        (lambda: parse([GPT2, "--config.step=1"]), "config.step=1: there is no key 'step'; did you mean 'steps'[?] .*"),
        (
            lambda: parse([GPT2, "--config.heads=1"]),
            "config.heads=1: there is no key 'heads'; did you mean 'model.blocks.main.attention.heads'[?] .*",
        ),
        (
            lambda: parse(["--config=configs/gtp2.py:tiny"]),
            "--config=configs/gtp2.py:tiny: there is no such file; did you mean 'gpt2:tiny'[?] .*",
        ),
        (
            lambda: evaluate.main(["--stride", "x"]),
            ".*--stride: x is not allowed: it must be an integer of at least 1.*",
        ),
        (lambda: evaluate.main(["--workdir", "runs/a", "--fewshot", "1"]), "--fewshot is not allowed without --tasks"),
        (lambda: evaluate.main(["--workdir=a", "--strid", "1"]), ".*: --strid 1 [(]see --help[)]"),
        (
            lambda: plan.main([GPT2, "--topology=h100:2", "--slices=0"]),
            "--slices=0 is not allowed: it must be at least 1",
        ),
        (lambda: get_family("lama"), "model_type='lama' is not allowed: it must be one of .*; did you mean 'llama'[?]"),
        (
            lambda: pretrained.check_options(tiny_model().config, parse([GPT2, "--config.model.width=64", STARTS])),
            "config.model.width=64 is not allowed: it must be 32 to start from runs/a: its parameters were trained for the "
            "function that this option decides",
        ),
        (
            lambda: check_fork("runs/a", None, parse([GPT2]), []),
            "--fork is not allowed with --workdir=runs/a, which has no good checkpoint to resume from: .*, use --start RUN",
        ),
        (lambda: tiny_model().generate("a", seed=-1), "seed=-1 is not allowed: .* an integer of at least 0 and below 2.32"),
        (lambda: tiny_model().generate("a", seed=[1, 2]), r"seed=\[1, 2\] .* one number, or one for each of 1 prompts"),
    ],
)
def test_a_mistake_is_one_line_with_key_value_and_what_is_allowed(mistake, text):
    with pytest.raises(UserError) as raised:
        mistake()
    assert re.fullmatch(text, str(raised.value)), raised.value


def test_an_address_in_a_bucket_without_its_package_is_one_line(capsys):
    def main(_):
        raise ImportError("Please install gcsfs to access Google Storage")  # as fsspec says it

    with pytest.raises(SystemExit) as end:
        command.run(main, [])
    assert end.value.code == MISTAKE
    assert "gs://... needs gcsfs, which is not installed: pip install 'xfresearch[cloud]', or " in capsys.readouterr().err


def test_a_result_never_replaces_a_directory(tmp_path):
    (tmp_path / "kept").touch()
    with pytest.raises(UserError, match=f"^{tmp_path} already exists: export to a new directory$"):
        require_new(tmp_path, "export")
