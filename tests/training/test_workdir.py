"""What may differ when a run goes on in its directory, and what may not."""

import pytest

from tests.tiny_runs import tiny_config
from xfresearch.errors import UserError
from xfresearch.training.workdir import record, starts


@pytest.mark.parametrize(
    "overrides",
    [
        {"model__blocks__main__attention__kernel": "plain"},
        {"training__remat": "full", "mesh__fsdp": 2, "mesh__between": "fsdp"},
        {"data__workers": 3, "log__every": 7},
    ],
)
def test_how_a_run_is_computed_may_differ(tmp_path, overrides):
    record(tmp_path, tiny_config(), fork=False)
    record(tmp_path, tiny_config(**overrides), fork=False)
    assert len(starts(tmp_path)) == 2


@pytest.mark.parametrize(
    "overrides", [{"optimizer__learning_rate": 0.5}, {"model__blocks__main__attention__window": 9}]
)
def test_what_a_run_computes_may_not(tmp_path, overrides):
    record(tmp_path, tiny_config(), fork=False)
    with pytest.raises(UserError, match="--fork"):
        record(tmp_path, tiny_config(**overrides), fork=False)
    record(tmp_path, tiny_config(**overrides), fork=True)
    assert len(starts(tmp_path)) == 2
