"""Cached decoding equals the uncached model, does not depend on other prompts, and samples as specified."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.passes import forward
from tests.contracts.variants import in_float64, model, random_params
from tests.daily import daily
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models import decoding, transformer
from xfresearch.models.sampling import Sampling
from xfresearch.runtime.errors import UserError

MAIN = "blocks.main."
MEMORY = {MAIN + "layout": "all_attention", MAIN + "attention.memory_slots": 3, "final_norm": "none"}
SPARSE = {MAIN + "feed_forward.kind": "moe", MAIN + "norm": "rms"}
ROPE = {MAIN + "attention.position": "rope"}
CONFIGS = {
    "gpt2, learned, GQA": {"position": "learned"},
    "gpt2, none, MQA": {MAIN + "attention.kv_heads": 1},
    "gpt2, sinusoidal, MHA": {"position": "sinusoidal", MAIN + "attention.kv_heads": 4},
    "all_attention, learned": {**MEMORY, "position": "learned"},
    "all_attention, rope, MQA": {**MEMORY, **ROPE, MAIN + "attention.kv_heads": 1},
    "moe, rope, GQA": {**SPARSE, **ROPE},
    "moe, none": SPARSE,
    "moe, capacity": {**SPARSE, MAIN + "feed_forward.moe.capacity": 0.125, MAIN + "feed_forward.moe.shared": 1},
}
SCANNED = ("all_attention, learned", "moe, none")
COVERED = ("gpt2, none, MQA", "gpt2, sinusoidal, MHA", "moe, rope, GQA")  # by the contract of cached decoding, too
PROMPTS = [[3, 1, 4, 1, 5], [2], [7, 1]]
GREEDY = Sampling(temperature=0)


def config_of(name: str, **changes):
    return model({"max_length": 64, **CONFIGS[name], **changes})


def new_tokens(config, params, prompts=PROMPTS, count=20, sampling=GREEDY, **options) -> list[list[int]]:
    chunks = decoding.generate(config, params, prompts, count, sampling, **options)
    return [sum(parts, []) for parts in zip(*chunks, strict=True)]


@partial(jax.jit, static_argnums=0)
def logits_of(config, params, tokens_BL):
    return forward(config, params, tokens_BL)[0]


def uncached_logits(config, params, texts, length=48) -> list[np.ndarray]:
    """Logits [len(text), V] of every text. Texts are padded on the right, so that only one size is compiled."""
    tokens_BL = np.array([text + [0] * (length - len(text)) for text in texts], np.int32)
    logits_BLV = np.asarray(logits_of(config, params, tokens_BL))
    return [logits_LV[: len(text)] for logits_LV, text in zip(logits_BLV, texts, strict=True)]


@pytest.mark.parametrize(
    "name, layers",
    [
        *daily([(name, "unroll") for name in CONFIGS.keys() - {*SCANNED, *COVERED}], [(name, "unroll") for name in CONFIGS]),
        *((name, "scan") for name in SCANNED),
    ],
)
def test_cached_logits_equal_uncached_ones(name, layers, x64):
    check_cached_logits(in_float64(config_of(name)), layers)


def check_cached_logits(config, layers):
    """Asserts that cached logits of left-padded prompts and four more tokens equal a full pass over each text alone."""
    params = random_params(config)
    read = decoding.taken_apart(config, params) if layers == "unroll" else params
    tokens_BP, segments_BP = decoding.pad_left(PROMPTS)
    keys_B = decoding.row_keys(PROMPTS, 0)
    state = decoding.prefill(config, 24, read, tokens_BP, segments_BP, keys_B)
    texts = [list(prompt) for prompt in PROMPTS]
    advance = jax.jit(lambda state, token_B: decoding.advance(transformer.bind(config, read), state, token_B, -1))
    seen = [state["logits"]]
    for step in range(4):
        token_B = jnp.array([(5 * step + row) % config.vocab_size for row in range(len(texts))], jnp.int32)
        state = advance(state, token_B)
        seen.append(state["logits"])
        for text, token in zip(texts, token_B.tolist(), strict=True):
            text.append(token)
    for row, logits_LV in enumerate(uncached_logits(config, params, texts)):
        cached_LV = np.stack([logits_BV[row] for logits_BV in seen])
        assert relative_error(cached_LV, logits_LV[-len(seen) :]) < TOLERANCE["float64"], PROMPTS[row]


@pytest.mark.parametrize("name", ["gpt2, learned, GQA", "all_attention, rope, MQA", "moe, rope, GQA"])
def test_greedy_text_equals_that_of_the_uncached_model(name):
    config = config_of(name)
    params = random_params(config)
    texts = [list(prompt) for prompt in PROMPTS]
    for _ in range(20):
        for text, logits_LV in zip(texts, uncached_logits(config, params, texts), strict=True):
            text.append(int(logits_LV[-1].argmax()))
    assert new_tokens(config, params) == [text[-20:] for text in texts]


@pytest.mark.parametrize(
    "name, sampling",
    [
        ("gpt2, learned, GQA", Sampling(1.5, 6, 0.9)),
        pytest.param("all_attention, rope, MQA", Sampling(1.5), marks=pytest.mark.long),
        pytest.param("moe, rope, GQA", GREEDY, marks=pytest.mark.long),
        ("moe, capacity", GREEDY),
    ],
)
def test_a_prompt_yields_the_same_text_alone_and_among_others(name, sampling):
    config = config_of(name)
    params = random_params(config)
    together = new_tokens(config, params, sampling=sampling, seed=3)
    for prompt, text in zip(PROMPTS, together, strict=True):
        assert new_tokens(config, params, [prompt], sampling=sampling, seed=3) == [text]
    longer = [[1] * 30, *PROMPTS[::-1]]
    assert new_tokens(config, params, longer, sampling=sampling, seed=3)[:0:-1] == together


def test_copies_of_a_prompt_differ_and_a_seed_repeats_its_texts():
    config = config_of("gpt2, none, MQA")
    params = random_params(config)
    twice = new_tokens(config, params, [[1], [1]], sampling=Sampling())
    assert twice[0] != twice[1]
    assert new_tokens(config, params, [[1], [1]], sampling=Sampling()) == twice
    assert new_tokens(config, params, [[1], [1]], sampling=Sampling(), seed=1) != twice


@pytest.mark.parametrize("count", [1, decoding.CHUNK, decoding.CHUNK + 3])
def test_generates_the_requested_number_of_tokens(count):
    config = config_of("gpt2, none, MQA")
    assert [len(row) for row in new_tokens(config, random_params(config), count=count)] == [count] * len(PROMPTS)


def test_a_text_ends_before_its_first_stop_token_and_the_others_continue():
    config = config_of("gpt2, learned, GQA")
    params = random_params(config)
    whole = new_tokens(config, params, count=40, sampling=Sampling(2.0, top_p=1.0))
    other = next(row for row in whole if whole[0][5] not in row)
    stops = (whole[0][5], next(token for token in other if token not in whole[0][:6]))
    stopped = new_tokens(config, params, count=40, sampling=Sampling(2.0, top_p=1.0), stops=stops)
    ends = [next((i for i, token in enumerate(row) if token in stops), None) for row in whole]
    assert stopped == [row[:end] for row, end in zip(whole, ends, strict=True)]
    assert {row[end] for row, end in zip(whole, ends, strict=True) if end is not None} == set(stops)
    assert len({len(row) for row in stopped}) > 1


def test_decoding_stops_when_every_text_has_ended():
    config = config_of("gpt2, none, MQA")
    params = random_params(config)
    end = new_tokens(config, params, [[1]])[0][0]
    chunks = list(decoding.generate(config, params, [[1]], 1000, GREEDY, stops=(end,)))
    assert chunks == [[[]]]
    tokens_BP, segments_BP = decoding.pad_left([[1]])
    state = decoding.prefill(config, 64, params, tokens_BP, segments_BP, decoding.row_keys([[1]], 0))
    state, _ = decoding.decode_chunk((config, GREEDY, (end,), config.vocab_size, None), params, state, 9)
    assert int(state["drawn"]) == 1


def test_ids_outside_the_tokenizers_vocabulary_are_never_drawn():
    config = config_of("gpt2, none, MQA")
    texts = new_tokens(config, random_params(config), count=64, sampling=Sampling(50.0, top_p=1.0), vocab_size=5)
    assert set(sum(texts, [])) == set(range(5))


def test_a_step_reads_memory_only_from_the_cache():
    config = config_of("all_attention, learned")
    params = random_params(config)
    tokens_BP, segments_BP = decoding.pad_left(PROMPTS)
    state = decoding.prefill(config, 24, params, tokens_BP, segments_BP, decoding.row_keys(PROMPTS, 0))
    poisoned = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * jnp.nan if "memory" in jax.tree_util.keystr(path) else leaf, params
    )
    assert any(np.isnan(leaf).any() for leaf in jax.tree.leaves(poisoned))
    token_B = jnp.array([1, 2, 3], jnp.int32)
    after = [decoding.advance(transformer.bind(config, p), state, token_B, -1) for p in (params, poisoned)]
    np.testing.assert_array_equal(after[0]["logits"], after[1]["logits"])


def test_the_cache_is_donated():
    config = config_of("all_attention, learned")
    params = random_params(config)
    tokens_BP, segments_BP = decoding.pad_left(PROMPTS)
    state = decoding.prefill(config, 64, params, tokens_BP, segments_BP, decoding.row_keys(PROMPTS, 0))
    caches = jax.tree.leaves(state["caches"])
    decoding.decode_chunk((config, GREEDY, -1, config.vocab_size, None), params, state, 3)
    assert all(cache.is_deleted() for cache in caches)


def reference_probabilities(logits_V, sampling: Sampling) -> np.ndarray:
    """Probabilities [V] after temperature, top_k and top_p, from the definition, for distinct logits."""
    order = np.argsort(-logits_V)
    p_V = np.exp((logits_V - logits_V.max()) / sampling.temperature)
    p_V[order[sampling.top_k or len(order) :]] = 0
    p_V /= p_V.sum()
    count = next((n for n in range(1, len(order)) if p_V[order[:n]].sum() >= sampling.top_p), len(order))
    p_V[order[count:]] = 0
    return p_V / p_V.sum()


@settings(deadline=None, max_examples=40)
@given(
    st.permutations(range(9)),
    st.floats(0.2, 3),
    st.integers(0, 12),
    st.sampled_from([0.01, 0.3, 0.55, 0.9, 0.999, 1.0]),
)
def test_top_k_and_top_p_follow_their_definition(ranks, temperature, top_k, top_p):
    logits_V = np.array(ranks, np.float32) * 0.37
    sampling = Sampling(temperature, top_k, top_p)
    with jax.enable_x64(True):
        p_V = np.asarray(jax.nn.softmax(decoding.truncate(jnp.asarray(logits_V[None], jnp.float64), sampling))[0])
    expected = reference_probabilities(logits_V.astype(np.float64), sampling)
    np.testing.assert_array_equal(p_V > 0, expected > 0)
    assert relative_error(p_V, expected) < TOLERANCE["float64"]


def test_a_top_p_below_the_smallest_float32_keeps_the_likeliest_token():
    logits_BV = jnp.array([[0.0, 3.0, 1.0]])
    actual_BV = decoding.truncate(logits_BV, Sampling(1.0, top_p=1e-50))
    np.testing.assert_array_equal(actual_BV, [[-np.inf, 0.0, -np.inf]])


def test_draws_follow_the_distribution():
    sampling = Sampling(0.7, 5, 0.95)
    n = 20_000
    logits_V = np.linspace(0, 2, 8, dtype=np.float32)
    keys = jax.random.split(jax.random.key(0), n)
    drawn = np.asarray(decoding.draw(jnp.broadcast_to(logits_V, (n, 8)), keys, sampling))
    p_V = reference_probabilities(logits_V, sampling)
    share_V = np.bincount(drawn, minlength=8) / n
    assert np.all(share_V[p_V == 0] == 0)
    assert np.all(np.abs(share_V - p_V) <= 4 * np.sqrt(p_V * (1 - p_V) / n))


def test_a_tiny_temperature_equals_greedy_decoding():
    config = config_of("gpt2, none, MQA")
    params = random_params(config)
    assert new_tokens(config, params, sampling=Sampling(1e-30)) == new_tokens(config, params)


@pytest.mark.parametrize(
    "arguments",
    [
        *({"temperature": value} for value in (-1, float("nan"), None)),
        *({"top_k": value} for value in (-1, 2.5)),
        *({"top_p": value} for value in (0, 1.1, "x")),
    ],
)
def test_the_error_for_bad_sampling_names_the_option(arguments):
    (name,) = arguments
    with pytest.raises(UserError, match=f"{name}=.*must be"):
        Sampling(**arguments)


def arrays_made_in_loop(text: str) -> list[tuple[str, int]]:
    """(instruction, size) of the arrays that the body of a compiled program's only loop makes, not as part of a fusion."""
    (body,) = set(re.findall(r"while\(.*body=%?([\w.-]+)", text))
    lines = re.search(rf"^%?{re.escape(body)} \(.*?^}}", text, re.DOTALL | re.MULTILINE)[0].splitlines()
    made = re.compile(r" *(?:ROOT )?(%?\S+ = \w+\[([\d,]+)\]\S* (?!get-tuple-element|bitcast|constant)[\w-]+)\(")
    return [(result[1], math.prod(map(int, result[2].split(",")))) for result in map(made.match, lines) if result]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads a program for a CPU")
@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_copies_neither_weights_nor_caches(rows):
    """Of the arrays as large as a layer's cache or matrix, the loop's body makes none but the caches, in place."""
    config = config_of("gpt2, learned, GQA", width=64, max_length=256)
    params = decoding.taken_apart(config, random_params(config))
    tokens_BP, segments_BP = decoding.pad_left([[1]] * rows)
    state = decoding.prefill(config, 256, params, tokens_BP, segments_BP, decoding.row_keys([[1]] * rows, 0))
    sizes = {leaf.size for leaf in jax.tree.leaves((params["blocks"], state["caches"])) if leaf.size >= 64 * 32}
    lowered = decoding.decode_chunk.lower((config, GREEDY, (), config.vocab_size, None), params, state, 3)
    made = [line for line, size in arrays_made_in_loop(lowered.compile().as_text()) if size in sizes]
    caches = len(jax.tree.leaves(state["caches"]))
    assert len(made) == caches == 4, made
    assert all("dynamic-update-slice" in line for line in made)
