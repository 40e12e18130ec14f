"""What may differ when a run goes on in its directory, and what may not."""

import pytest
from etils import epath

from tests.tiny_runs import tiny_config
from xfresearch.errors import UserError
from xfresearch.training.workdir import record, starts


@pytest.fixture
def workdir(tmp_path):
    return epath.Path(tmp_path)


@pytest.mark.parametrize(
    "overrides",
    [
        {"model__blocks__main__attention__kernel": "plain"},
        {"training__remat": "full", "mesh__fsdp": 2, "mesh__between": "fsdp"},
        {"data__workers": 3, "log__every": 7},
    ],
)
def test_how_a_run_is_computed_may_differ(workdir, overrides):
    record(workdir, tiny_config(), fork=False)
    record(workdir, tiny_config(**overrides), fork=False)
    assert len(starts(workdir)) == 2


@pytest.mark.parametrize(
    "overrides", [{"optimizer__learning_rate": 0.5}, {"model__blocks__main__attention__window": 9}]
)
def test_what_a_run_computes_may_not(workdir, overrides):
    record(workdir, tiny_config(), fork=False)
    with pytest.raises(UserError, match="--fork"):
        record(workdir, tiny_config(**overrides), fork=False)
    record(workdir, tiny_config(**overrides), fork=True)
    assert len(starts(workdir)) == 2
