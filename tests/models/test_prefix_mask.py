"""Prefixes in a single stack: their tokens see each other, in attention kernels, in models, and in cached decoding."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xfresearch as xf
from tests.contracts.passes import forward
from tests.contracts.variants import ALL, BATCH, LENGTH, in_float64, model, random_params, tokens_for
from tests.daily import daily
from tests.kernels.attention_cases import draw
from tests.reference import model as reference
from tests.tiny_runs import tiny_config
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.kernels.attention import PREFIXES, REFUSALS, attention, describe
from xfresearch.models import decoding, transformer
from xfresearch.options.objectives import Prefix
from xfresearch.run_config.config_files import parse
from xfresearch.runtime.errors import UserError

# Two documents in a row, of which each has a prefix, and one document with padding.
SEGMENTS_BL = np.array([[1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0, 0]], np.int32)
PREFIX_BL = np.array([[1, 1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]], np.int32)
POSITIONS_BL = np.array([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1]], np.int32)
PACKED = {"segments_BL": SEGMENTS_BL, "positions_BL": POSITIONS_BL, "prefix_BL": PREFIX_BL}
SUPPORTED = ("plain", "chunked")


def test_chunks_equal_the_plain_kernel_with_gradients(monkeypatch, x64):
    monkeypatch.setattr("xfresearch.kernels.chunked_attention.CHUNK", 16)
    (q, k, v, _), (ids, _) = draw(L=40, segments=True, dtype="float64")
    first = jnp.concatenate([jnp.ones((2, 1), int), jnp.diff(ids) != 0], 1)
    prefix = ((jnp.arange(40) - jax.lax.cummax(first * jnp.arange(40), axis=1)) < 5).astype(jnp.int32)

    def value(kernel):
        of_keys = {"q_segments_BL": ids, "k_segments_BS": ids, "k_prefix_BS": prefix}
        return lambda *qkv: jnp.sin(attention(*qkv, **of_keys, implementation=kernel)).sum()

    plain, chunked = (jax.value_and_grad(value(kernel), (0, 1, 2))(q, k, v) for kernel in SUPPORTED)
    for expected, actual in zip(jax.tree.leaves(plain), jax.tree.leaves(chunked), strict=True):
        assert relative_error(actual, expected) < TOLERANCE["float64"]


def test_a_prefix_without_segments_is_an_error():
    (q, k, v, _), _ = draw(L=8)
    with pytest.raises(ValueError, match="k_prefix_BS needs q_segments_BL and k_segments_BS"):
        attention(q, k, v, k_prefix_BS=jnp.ones(q.shape[:2], jnp.int32))


@pytest.mark.parametrize("kernel", [name for name in REFUSALS if name not in SUPPORTED])
def test_other_kernels_refuse_prefixes_in_one_line(kernel, monkeypatch):
    """Each on a device and with a mask with which it supports all else."""
    monkeypatch.setattr("xfresearch.kernels.attention.refuse_tokamax", lambda *device: "")
    (q, k, v, _), ids = draw(L=256, G=4, segments=True, dtype="bfloat16")
    call = describe(q, k, v, segments=ids, altered=(PREFIXES,))
    gpu = call._replace(platform="gpu", capability=(9, 0))
    calls = {"cudnn": gpu, "tokamax": gpu, "splash": call._replace(platform="tpu"), "ring": call._replace(context=2)}
    calls["banded"] = call._replace(mask=call.mask._replace(window=32))
    asked = calls.get(kernel, call)
    assert REFUSALS[kernel](asked._replace(altered=())) == ""
    assert "prefixes" in REFUSALS[kernel](asked) and "\n" not in REFUSALS[kernel](asked)


NAMES = ["base", "attention.position=rope", "attention.kind=differential", "attention.kind=value_residual"]
NAMES += ["attention.position=alibi", "attention.memory_slots=32", "configs/gpt2.py"]


@pytest.mark.parametrize("name", daily(("base", "attention.kind=differential"), NAMES))
def test_packed_rows_equal_the_reference(name, x64):
    config = in_float64(ALL[name])
    params, tokens_BL = random_params(config), tokens_for(config)
    logits_BLV, _ = forward(config, params, tokens_BL, **PACKED)
    of_rows = zip(tokens_BL, POSITIONS_BL, SEGMENTS_BL, PREFIX_BL, strict=True)
    arrays = reference.tree(params)
    expected = [reference.model(config, arrays, *row[:3], prefix=row[3])[0] for row in of_rows]
    assert relative_error(logits_BLV, np.stack(expected)) < TOLERANCE["float64"]


def test_a_prefix_of_the_whole_text_is_a_model_that_is_not_causal(x64):
    config = in_float64(ALL["base"])
    params, tokens_BL = random_params(config), tokens_for(config)
    lm = made(config, params)
    whole, none = (lm(tokens_BL, prefix_BL=np.full((BATCH, LENGTH), flag)) for flag in (1, 0))
    other = made(replace(config, causal=False), params)
    assert relative_error(whole, other(tokens_BL)) < TOLERANCE["float64"]
    assert relative_error(none, lm(tokens_BL)) < TOLERANCE["float64"] and relative_error(whole, none) > 1e-3


def made(config, params, **run) -> xf.LanguageModel:
    return xf.LanguageModel(config, params, ByteTokenizer(), replace(tiny_config("gpt2"), model=config, **run))


@pytest.mark.parametrize("name", daily(("configs/gpt2.py",), ["configs/gpt2.py", "attention.kind=differential"]))
def test_cached_decoding_reads_the_prompt_as_the_prefix(name, x64):
    """Of left-padded prompts of different lengths, each token as in a full pass over its text."""
    config = in_float64(ALL[name])
    params, prompts = random_params(config), [[5, 9, 3, 7], [11, 2], [4]]
    lm = made(config, params)
    chunks = decoding.generate(config, params, prompts, 6, decoding.Sampling(temperature=0), prefix=True)
    texts = [sum(each, []) for each in zip(*chunks, strict=True)]
    causal = decoding.generate(config, params, prompts, 6, decoding.Sampling(temperature=0))
    assert texts != [sum(each, []) for each in zip(*causal, strict=True)]
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = [[*prompt, *text]]
        prefix = (np.arange(len(tokens[0])) < len(prompt))[None].astype(int)
        logits_LV = lm(tokens, prefix_BL=prefix)[0]
        assert np.argmax(logits_LV, -1)[len(prompt) - 1 : -1].tolist() == text


@pytest.mark.parametrize("beams", [1, pytest.param(2, marks=pytest.mark.long)])
def test_generation_of_a_run_on_prefixes_reads_the_prompt_as_one(beams):
    config = model({"vocab_size": 257, "position": "learned"})
    params = transformer.init(config, jax.random.key(0))
    params = jax.tree.map(lambda leaf: 4 * leaf, params)  # so that what a token sees decides
    lm, other = made(config, params), tiny_config("gpt2").data
    on_prefixes = made(config, params, data=replace(other, objective=Prefix()))
    asked, settings = [list(b"the prompt"), list(b"another one")], {"max_new_tokens": 8, "temperature": 0.0}
    texts = on_prefixes.generate(asked, beams=beams, **settings)
    assert texts != lm.generate(asked, beams=beams, **settings)
    if beams == 1:
        greedy = decoding.Sampling(temperature=0)
        chunks = decoding.generate(config, params, asked, 8, greedy, stops=(256,), vocab_size=257, prefix=True)
        assert texts == [ByteTokenizer().decode(sum(each, [])) for each in zip(*chunks, strict=True)]


REFUSED = {
    "model.causal=False": "model.causal=False: every token sees all others",
    "model.blocks.main.attention.window=8": "blocks.0.attention: window=8 counts past tokens",
    "model.blocks.main.attention.position=t5": "blocks.0.attention: position='t5' is of distances to past tokens",
    "model.blocks.main.attention.kind=lambda": "blocks.0.attention: kind='lambda' is causal",
    "sequence_length=1": "sequence_length=1 is not allowed: it must be at least 2",
}


@pytest.mark.parametrize("option", REFUSED)
def test_what_has_no_prefix_is_refused_in_one_line(option):
    flags = ["--config=gpt2:tiny", "--config.data.objective.kind=prefix", f"--config.{option}"]
    with pytest.raises(UserError, match=REFUSED[option]):
        parse(flags)
    parse(flags[:-1])


def test_a_kernel_without_prefixes_is_refused_before_training():
    from xfresearch.training.kernel_choices import kernel_choices

    config = parse(["--config=gpt2:tiny", "--config.data.objective.kind=prefix"])
    assert {choice.name for choice in kernel_choices(config).values()} == {"plain"}
    blocked = replace(config, training=replace(config.training, attention_kernel="blocked"))
    with pytest.raises(UserError, match="attention_kernel='blocked' .* without prefixes"):
        kernel_choices(blocked)
