"""Every invalid model raises an error of one line that names the key, the value and what is allowed."""

import math

import pytest

from tests.contracts.variants import BASE, MAIN, change, fields, get, model, needed, plain_path
from xfresearch.models.model_config import ModelConfig
from xfresearch.options.groups import to_config_dict
from xfresearch.options.reading import from_dict
from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.config import Config
from xfresearch.run_config.config_files import default_config
from xfresearch.run_config.resolving import model_from, resolve
from xfresearch.runtime.errors import UserError

B = "blocks.main."
A, F = B + "attention.", B + "feed_forward."

ABOVE_ZERO = ("init_std", "blocks.main.norm_alpha")  # with 0, everything would stay 0
INVALID = [
    ({A + "heads": 5}, ["blocks.main.attention.heads=5", "a divisor of model.width=32", "head_size"]),
    ({A + "kv_heads": 3}, ["attention.kv_heads=3", "a divisor of attention.heads=4"]),
    ({A + "kv_heads": 8}, ["attention.kv_heads=8", "a divisor of attention.heads=4"]),
    ({A + "head_size": 5, A + "position": "rope"}, ["attention.rope.fraction=1.0", "5 dimensions", "even"]),
    (
        {A + "kind": "differential", A + "position": "rope", A + "rope.fraction": 0.9},
        ["attention.rope.fraction=0.9", "4 dimensions", "even"],
    ),
    ({A + "rank": 3}, ["attention.rank=3", "0, its default: it is read only with query='merged'"]),
    ({F + "kind": "moe", F + "moe.top_k": 9}, ["moe.top_k=9", "at most moe.experts=8"]),
    ({F + "kind": "moe", F + "bias": True}, ["blocks.main.feed_forward.bias=True", "there is no such option"]),
    ({F + "kind": "moe", F + "moe.capacity": 1.0, "max_length": 0}, ["model.max_length=0", "at least 1", "capacity"]),
    ({"pattern": ()}, ["model.pattern=()", "at least one"]),
    ({"pattern": ("mian",)}, ["model.pattern=('mian',)", "main", "did you mean 'main'"]),
    ({"pattern": ("main",) * 3}, ["model.depth=2", "a multiple of the 3"]),
    ({"blocks": {"main": MAIN, "spare": MAIN}}, ["model.blocks='spare'", "a block that model.pattern or .segments uses"]),
    (
        {"blocks": {"main": MAIN, "main_1": MAIN}, "pattern": ("main_1", "main", "main"), "depth": 3},
        ["model.blocks='main_1'", "another name"],
    ),
    (
        {"depth": 4, "segments": ((("main",), -2), (("main",), 6))},
        ["model.segments=((('main',), -2), (('main',), 6))", "repeats of at least 0"],
    ),
    ({"dtype": "float64"}, ["model.param_dtype='float32'", "float64"]),
    (
        {B + "layout": "post_norm", B + "norms.feed_forward_in.kind": "rms"},
        ["blocks.main.norms.feed_forward_in.kind='rms'", "the options are attention_post, feed_forward_post"],
    ),
    ({B + "layout": "no_norm_between", B + "norms.feed_forward_in.kind": "none"}, ["(the options are attention_in)"]),
]


def with_option(path: str) -> ModelConfig:
    """The base, changed so that it has the option."""
    changed = BASE
    for name, value in needed(path, None).items():
        changed = change(changed, name, value)
    return changed


def assert_one_line(error, words):
    line = str(error.value)
    assert "\n" not in line
    for word in words:
        assert word in line, line


@pytest.mark.parametrize("changes, words", INVALID, ids=[str(words[0]) for _, words in INVALID])
def test_invalid_combinations(changes, words):
    with pytest.raises(UserError) as error:
        model(changes)
    assert_one_line(error, words)


@pytest.mark.parametrize("path", fields())
def test_every_option_refuses_another_type(path):
    data = to_config_dict(with_option(path)).to_dict()
    here = data
    *parents, name = plain_path(path).split(".")
    for parent in parents:
        here = here[parent]
    here[name] = {"a": 1}
    with pytest.raises(UserError) as error:
        from_dict(ModelConfig, data, "config.model")
    assert_one_line(error, [f"config.model.{plain_path(path)}"])


@pytest.mark.parametrize("path", [path for path, kind in fields().items() if kind in (int, float)])
def test_every_number_refuses_values_below_its_range(path):
    base = with_option(path)
    data = to_config_dict(change(base, path, type(get(base, path))(-1)))
    with pytest.raises(UserError) as error:
        model_from(data)
    assert_one_line(error, [f"config.model.{plain_path(path)}=-1", "at least" if path not in ABOVE_ZERO else "above 0"])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("path", ["blocks.main.norm_epsilon", "init_std", "blocks.main.attention.rope.theta"])
def test_numbers_must_be_finite(path, value):
    data = to_config_dict(change(BASE, path, value))
    with pytest.raises(UserError) as error:
        model_from(data)
    assert_one_line(error, [f"config.model.{path}={value}"])


def test_costs_without_a_vocabulary_size_are_an_error():
    with pytest.raises(UserError) as error:
        costs(model({"vocab_size": 0}))
    assert_one_line(error, ["model.vocab_size=0", "at least 1", "the config of the run"])


@pytest.mark.parametrize("tokenizer, size", [("bytes", 257), ("bpe", 300)])
def test_costs_of_a_run_have_the_vocabulary_of_its_tokenizer(tokenizer, size):
    config = default_config()
    config.data.tokenizer, config.data.bpe_vocab = tokenizer, 300
    known = default_config()
    known.model.vocab_size = size
    assert costs(config) == costs(known)
    assert costs(resolve(from_dict(Config, config))) == costs(known)
    config.model.vocab_size = 400
    known.model.vocab_size = 400
    assert costs(config) == costs(known)


def test_costs_without_a_length_are_an_error():
    with pytest.raises(UserError) as error:
        costs(model({"max_length": 0}))
    assert_one_line(error, ["model.max_length=0", "sequence_length"])
