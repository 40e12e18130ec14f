"""What may differ when a run goes on in its directory, and what may not."""

import pytest
from etils import epath

from tests.data import made_tokenizers as made
from tests.tiny_runs import tiny_config, tiny_model
from xfresearch.data.tokenizers import ByteTokenizer, load_tokenizer
from xfresearch.errors import UserError
from xfresearch.training.workdir import keep, record, starts


@pytest.fixture
def workdir(tmp_path):
    return epath.Path(tmp_path)


def begin(workdir, config, fork: bool = False) -> None:
    record(workdir, config, fork)
    keep(workdir, config, ByteTokenizer())


@pytest.mark.parametrize(
    "overrides",
    [
        {"model__blocks__main__attention__kernel": "plain"},
        {"training__remat": "full", "mesh__fsdp": 2, "mesh__between": "fsdp"},
        {"data__workers": 3, "log__every": 7},
    ],
)
def test_how_a_run_is_computed_may_differ(workdir, overrides):
    begin(workdir, tiny_config())
    begin(workdir, tiny_config(**overrides))
    assert len(starts(workdir)) == 2


@pytest.mark.parametrize(
    "overrides", [{"optimizer__learning_rate": 0.5}, {"model__blocks__main__attention__window": 9}]
)
def test_what_a_run_computes_may_not(workdir, overrides):
    begin(workdir, tiny_config())
    with pytest.raises(UserError, match="--fork"):
        begin(workdir, tiny_config(**overrides))
    begin(workdir, tiny_config(**overrides), fork=True)
    assert len(starts(workdir)) == 2


def test_a_model_without_its_optimiser_is_no_run_to_go_on_with(workdir):
    tiny_model().save(workdir / "saved")
    for fork in (False, True):
        with pytest.raises(UserError, match="no optimiser's state to go on from"):
            record(workdir / "saved", tiny_config(), fork)


def test_of_two_tokenizers_the_last_is_kept(workdir):
    made.write(workdir / "other", {"tokenizer.json": made.byte_level()})
    other = load_tokenizer(workdir / "other")
    for tokenizer in (ByteTokenizer(), other):
        keep(workdir, tiny_config(), tokenizer)
    assert load_tokenizer(workdir / "tokenizer").vocab_size == other.vocab_size != ByteTokenizer().vocab_size
