"""Every option and every entry of a table is tested: a new one without a reference or a variant fails here."""

import pytest
from _pytest.mark.expression import Expression

from tests import variants as cases
from tests.conftest import pytest_make_parametrize_id as case_id
from tests.contracts import variants
from tests.contracts.variants import ONE_STACK
from tests.covers import covered
from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.kinds import FEED_FORWARDS, MIXERS
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.norms import NORMS

FIELDS = variants.fields()
TABLES = {
    "layouts": (cases.LAYOUTS, LAYOUTS),
    "norms": (cases.NORMS, NORMS),
    "activations": (cases.ACTIVATIONS, ACTIVATIONS),
    "mixers": (cases.MIXERS, MIXERS),
    "feed-forward layers": (cases.FEED_FORWARDS | cases.ACTIVATIONS, FEED_FORWARDS),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_variant_has_a_reference(name):
    """A case in tests/variants/."""
    table, ours = TABLES[name]
    assert table.keys() == ours.keys()


def test_every_option_is_varied_or_covered_elsewhere():
    sites = {path for path in FIELDS if ".norms." in path}
    varied = {path for path, values in variants.choices().items() if values and not path.endswith((".kind", ".layout"))}
    assert set(FIELDS) == varied.union(sites, covered(), variants.SIZES & FIELDS.keys())


def test_every_need_is_that_of_an_option_or_a_value():
    choices = variants.choices()
    assert {path for path, _ in variants.NEEDS} <= FIELDS.keys() | choices.keys() | variants.inherited().keys()
    for (path, value), needs in variants.NEEDS.items():
        assert not value or not needs or value in map(str, choices[path]), f"{path}={value}"


def test_every_norm_site_is_set_in_some_variant():
    wanted = {f"{s.name}_{place}" for layout in ONE_STACK.values() for s in layout.branches for place in s.norms}
    blocks = [b for config in variants.VARIANTS.values() for b in config.blocks.values()]
    assert wanted == {site for b in blocks for site, norm in vars(b.norms).items() if norm.kind}


@pytest.mark.parametrize("table, field", [(ONE_STACK, "layout"), (NORMS, "norm")])
def test_every_entry_of_a_table_is_used_by_a_variant(table, field):
    assert set(table) == {getattr(b, field) for config in variants.VARIANTS.values() for b in config.blocks.values()}


def test_pytest_selects_each_variant_by_its_name():
    names = [case_id(name) for name in variants.ALL]
    assert len(set(names)) == len(names)
    for name in names:
        assert Expression.compile(name).evaluate(lambda word, name=name, **_: word == name), name


def test_named_configs_are_found():
    assert {"gpt2", "all_attention", "moe"} <= variants.NAMED.keys()
