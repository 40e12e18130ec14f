"""Every option and every entry of a table is tested: a new one without a reference or a variant fails here."""

import pytest

from tests.contracts import variants
from tests.covers import covered
from tests.models import reference
from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.norms import NORMS

FIELDS = variants.fields()


@pytest.mark.parametrize(
    "table, ours", [(reference.LAYOUTS, LAYOUTS), (reference.NORMS, NORMS), (reference.ACTIVATIONS, ACTIVATIONS)]
)
def test_every_variant_has_a_reference(table, ours):
    assert table.keys() == ours.keys()


def test_every_option_is_varied_or_covered_elsewhere():
    sites = {path for path in FIELDS if ".norms." in path}
    varied = {path for path, values in variants.choices().items() if values and not path.endswith((".kind", ".layout"))}
    assert set(FIELDS) == varied.union(sites, covered(), variants.SIZES & FIELDS.keys())


def test_every_norm_site_is_set_in_some_variant():
    wanted = {f"{s.name}_{place}" for layout in LAYOUTS.values() for s in layout.sublayers for place in s.norms}
    blocks = [b for config in variants.VARIANTS.values() for b in config.blocks.values()]
    assert wanted == {site for b in blocks for site, norm in vars(b.norms).items() if norm.kind}


@pytest.mark.parametrize("table, field", [(LAYOUTS, "layout"), (NORMS, "norm")])
def test_every_entry_of_a_table_is_used_by_a_variant(table, field):
    assert set(table) == {getattr(b, field) for config in variants.VARIANTS.values() for b in config.blocks.values()}


def test_named_configs_are_found():
    assert {"gpt2", "all_attention", "moe"} <= variants.NAMED.keys()
