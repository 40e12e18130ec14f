"""Conversions find sublayers by role: names are free, and a block may have several sublayers of a role."""

from dataclasses import fields, replace

import numpy as np
import pytest

from tests.surgery.comparing import assert_exact, assert_refused
from tests.tiny_runs import tiny_model
from xfresearch import surgery
from xfresearch.models.block_config import BLOCKS, BlockConfig, _class_of
from xfresearch.models.layouts import LAYOUTS, Layout
from xfresearch.surgery.network import Network, Params, take_apart

NAMES = {"attention": "local", "feed_forward": "inner"}
OPTIONS = {"widen": {"heads": 8, "hidden": 160}, "pool_groups": {"kv_heads": 2}, "stack": {"copies": 2}}
BARE = {"layout": "no_skip", "norms__attention_in__kind": "none", "norms__feed_forward_in__kind": "none"}
MODELS = {
    "pre_norm": {"norm_bias": True},
    "no_skip": BARE | {"attention__bias": "()"},
    "sink": {"attention__sink": "off_by_one"},
    "slots": {"attention__memory_slots": 6},
    "groups": {"attention__kv_heads": 2},
    "merged": {"attention__query": "merged", "attention__bias": "('query',)"},
}
DAILY = ("pre_norm", "no_skip")
FIXED = ("feed_forward_to_memory", "fuse_output")  # they map layouts to others by name


def renamed(text: str) -> str:
    for old, new in NAMES.items():
        text = text.replace(old, new)
    return text


def with_names(block: BlockConfig) -> BlockConfig:
    """The block with other names of its sublayers, in a layout of the test."""
    cls = BLOCKS[f"renamed_{block.layout}"]
    options = {each.name: getattr(block, each.name) for each in fields(BlockConfig)} | {"layout": f"renamed_{block.layout}"}
    sites = {renamed(each.name): getattr(block.norms, each.name) for each in fields(block.norms)}
    norms = replace(cls.__dataclass_fields__["norms"].default, **sites)
    return cls(**options, norms=norms, **{renamed(name): each for name, each in block.sublayers.items()})


def of(params: Params) -> Params:
    return {renamed(path): value for path, value in params.items()}


def outcome(network: Network, name: str):
    """The parameters of all layers after a conversion, or the refusal's words."""
    try:
        after = surgery.CONVERSIONS[name](network, **OPTIONS.get(name, {}))
        return after, [after.params(number) for number in range(len(after.layers))]
    except surgery.Refused as refused:
        return None, str(refused)


@pytest.mark.parametrize(
    "options", [each if each in DAILY else pytest.param(each, marks=pytest.mark.long) for each in MODELS]
)
def test_sublayers_of_other_names_are_converted_or_refused_alike(options, monkeypatch):
    lm = tiny_model(**{f"model__blocks__main__{key}": value for key, value in MODELS[options].items()})
    plain = take_apart(lm.config, lm.params)
    layout = plain.layers[0].block.layout
    branches = tuple(replace(branch, name=renamed(branch.name)) for branch in LAYOUTS[layout].branches)
    monkeypatch.setitem(LAYOUTS, f"renamed_{layout}", Layout(branches, "renamed"))
    monkeypatch.setitem(BLOCKS, f"renamed_{layout}", _class_of(f"renamed_{layout}", Layout(branches, "renamed")))
    layers = tuple(replace(at, block=with_names(at.block)) for at in plain.layers)
    other = replace(plain, layers=layers, params=lambda number: of(plain.params(number)))
    for name in [name for name in surgery.CONVERSIONS if name not in FIXED]:
        (new, expected), (same, actual) = (outcome(network, name) for network in (plain, other))
        if new is None:
            assert renamed(actual).replace(f"renamed_{layout}", layout) == renamed(expected), name
            continue
        assert [at.block for at in same.layers] == [with_names(at.block) for at in new.layers], name
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours.keys() == of(theirs).keys(), name
            assert all(np.array_equal(ours[path], value) for path, value in of(theirs).items()), name


MACARON = {"model__blocks__main__layout": "macaron", "model__final_norm": "none", "model__depth": 1}
EACH = {
    "widen": {"hidden": 160},
    "fold_norm": {},
    "upcycle": {},
    "absorb_value_output": {},
    "merge_query_key": {},
    "untie": {},
}


@pytest.mark.parametrize("name", EACH)
def test_every_sublayer_of_a_role_is_converted(name):
    lm = tiny_model(**MACARON)
    if name == "merge_query_key":
        lm = tiny_model(**MACARON, model__blocks__main__attention__bias="()")
    model = assert_exact(lm, name, **EACH[name])
    block = model.blocks["main"]
    if name == "widen":
        assert [block.feed_forward_1.hidden, block.feed_forward_2.hidden] == [160, 160]
    if name == "upcycle":
        assert block.feed_forward_1.mixture and block.feed_forward_2.mixture


@pytest.mark.parametrize(
    ("name", "term"),
    [
        ("fuse_output", r"W_1 reads norm\(x \+ o W_O\)"),
        ("drop_output", r"W_1 reads norm\(x \+ o W_O\)"),
        ("drop_query", "layout='macaron': x Q for this layer alone"),
        ("feed_forward_to_memory", r"x \+ f\(x\) / 2: no layout of one sublayer"),
        ("stack", "norms.feed_forward_2_post reads the skip"),
    ],
)
def test_a_refusal_for_several_sublayers_of_a_role_names_the_term(name, term):
    assert_refused(tiny_model(**MACARON), name, f"layer 0.*{term}")
