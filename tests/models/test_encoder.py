"""Models with an encoder and a decoder: values, costs, masks of pairs, padding, decoding with a cache."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.passes import forward, run
from tests.contracts.two_stacks import MODELS, SOURCE, TWO, made, packed, source_for
from tests.contracts.variants import BATCH, LENGTH, MAIN, change, in_float64, random_params, tokens_for
from tests.daily import daily
from tests.reference import model as reference
from tests.tiny_runs import rough_params, tiny_config, tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models import layers, transformer
from xfresearch.models.context import Context, Source
from xfresearch.models.counting import count_flops
from xfresearch.models.inputs import tap_shapes
from xfresearch.models.taps import captured
from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.resolving import resolve
from xfresearch.runtime.errors import UserError
from xfresearch.training.kernel_choices import kernel_choices


def case(name: str) -> tuple:
    """A model in float64, its parameters, and tokens."""
    config = in_float64(MODELS[name])
    return config, random_params(config), tokens_for(config)


@pytest.mark.parametrize("name", MODELS)
def test_every_tap_of_packed_pairs_equals_the_reference(name, x64):
    config, params, tokens_BL = case(name)
    names, context = tap_shapes(config), packed(config)
    actual = captured(config, run(config, params, tokens_BL, record=names, **context)[1].captures, names)
    _, values = reference.passed(config, params, tokens_BL, **context)
    assert actual.keys() <= values.keys()
    assert {f"encoder.blocks.{config.encoder.depth - 1}.attention.weights", "encoder.final", "embed"} <= actual.keys()
    for tap, value in actual.items():
        assert relative_error(value, values[tap]) < TOLERANCE["float64"], tap


@pytest.mark.parametrize("name", MODELS)
def test_costs_equal_the_counts(name):
    config = MODELS[name]
    tokens_BL, source = np.zeros((BATCH, LENGTH), np.int32), source_for(config)
    count = partial(forward, config, tokens_BL=tokens_BL, source=source)
    params = transformer.abstract(config)
    assert costs(config).parameters == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert count_flops(lambda params: count(params), params) == BATCH * LENGTH * costs(config, LENGTH).flops_per_token


@pytest.mark.parametrize("name", ["pre-norm", "experts"])
def test_scanned_equals_unrolled_with_all_results(name, x64):
    config, params, tokens_BL = case(name)
    context = packed(config)
    unrolled, losses = forward(config, params, tokens_BL, "unroll", **context)
    scanned, others = forward(config, params, tokens_BL, "scan", **context)
    assert relative_error(scanned, unrolled) < TOLERANCE["float64"]
    assert losses.keys() == others.keys()
    assert all(relative_error(others[each], losses[each]) < TOLERANCE["float64"] for each in losses)
    assert bool(losses) == (name == "experts")  # those of the encoder's experts


def test_padding_of_the_source_changes_nothing(x64):
    config, params, tokens_BL = case("merged")
    source = source_for(config)
    logits, _ = forward(config, params, tokens_BL, source=source)
    for before, after in ((0, 2), (3, 1)):
        pads = ((0, 0), (before, after))
        tokens_BS = np.pad(source.tokens_BS, pads, constant_values=5)
        segments_BS = np.pad(np.ones_like(source.tokens_BS), pads)
        positions_BS = np.maximum(np.cumsum(segments_BS, 1) - 1, 0)
        padded, _ = forward(config, params, tokens_BL, source=Source(tokens_BS, segments_BS, positions_BS))
        assert relative_error(padded, logits) < TOLERANCE["float64"]


def test_logits_depend_on_each_token_of_their_own_source_alone(x64):
    config, params, tokens_BL = case("pre-norm")
    context = packed(config)

    def logits(shift_BSW):
        change = {"encoder.embed": lambda x_BSW: x_BSW + shift_BSW}
        return forward(config, params, tokens_BL, replace=change, **context)[0]

    _, vjp = jax.vjp(logits, jnp.zeros((BATCH, SOURCE, config.encoder.width)))
    weights_V = np.random.default_rng(0).standard_normal(config.vocab_size)
    segments_BS, segments_BL = context["source"].segments_BS, context["segments_BL"]
    for position in (0, 3, LENGTH // 2 + 1):
        cotangent_BLV = np.zeros((BATCH, LENGTH, config.vocab_size))
        cotangent_BLV[0, position] = weights_V
        gradient_BS = np.abs(vjp(jnp.asarray(cotangent_BLV))[0]).max(-1)
        assert not gradient_BS[1:].any()
        assert ((gradient_BS[0] > 0) == (segments_BS[0] == segments_BL[0, position])).all()


DECODED = [("pre-norm", True), ("pre-norm", False), ("key-is-value", True), ("all-attention", True), ("no-key", True)]


@pytest.mark.parametrize("name, apart", daily(DECODED[:3], DECODED))
def test_cached_decoding_equals_the_full_pass(name, apart, x64):
    config, params, tokens_BL = case(name)
    segments_BS = np.array([[1] * SOURCE, [1] * (SOURCE - 2) + [0] * 2], np.int32)
    source = source_for(config)._replace(segments_BS=segments_BS)
    logits = jax.jit(lambda params: forward(config, params, tokens_BL, source=source)[0])(params)
    params = layers.apart(config, params) if apart else params
    assert relative_error(decoded(config, params, source, tokens_BL), logits) < TOLERANCE["float64"]


def decoded(config, params, source: Source, tokens_BL):
    """Logits from caches that have the keys and values of the source at once, and those of the tokens chunk by chunk."""

    @jax.jit
    def begin(params):
        lm = transformer.bind(config, params)
        ctx, _ = lm.encoded(Context(None, source=source))
        return lm.init_caches(BATCH, LENGTH + 2, ctx)

    @jax.jit
    def step(params, tokens_BC, start, caches):
        lm = transformer.bind(config, params)
        positions_BC = jnp.broadcast_to(start + jnp.arange(tokens_BC.shape[1]), tokens_BC.shape)
        ctx = Context(positions_BC, cache_index=start, source=Source(None, source.segments_BS))
        out = lm(tokens_BC, ctx, caches)
        return lm.logits(out.hidden_BLD), out.caches

    caches, pieces, start = begin(params), [], 0
    for size in (5, 1, 1, 1):
        logits_BCV, caches = step(params, tokens_BL[:, start : start + size], start, caches)
        pieces.append(logits_BCV)
        start += size
    return jnp.concatenate(pieces, 1)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    config = replace(MODELS["post-norm"], vocab_size=257)
    run = replace(tiny_config("gpt2"), model=config, source_length=SOURCE)
    return LanguageModel(config, rough_params(config), ByteTokenizer(), run)


def test_a_user_gives_sources_as_texts_or_ids(lm):
    end = lm.tokenizer.end_of_text
    source = np.array([[*b"abc", end]])
    tokens = np.array([[end, *b"xy"]])
    logits = lm(tokens, source=source)
    assert relative_error(lm(tokens, source="abc"), logits) < TOLERANCE["float32"]
    both = lm(np.repeat(tokens, 2, 0), source=["abc", list(b"abcde")])  # of different lengths
    assert relative_error(both[:1], logits) < TOLERANCE["float32"]
    assert relative_error(lm.loss(tokens, source=source), lm.loss(tokens, source=["abc"])) < TOLERANCE["float32"]


def test_generated_text_is_that_of_the_full_pass(lm):
    """Greedy, from the id that the decoder starts from; sources of different lengths beside each other."""
    end = lm.tokenizer.end_of_text
    settings = {"max_new_tokens": 5, "temperature": 0.0}
    texts = lm.generate(source=["abc", "a"], **settings)
    assert texts == [lm.generate(source=each, **settings) for each in ("abc", "a")]
    ids = [end]
    for _ in range(5):
        ids.append(int(lm(np.array([ids]), source="abc")[0, -1].argmax()))
    text = ids[1:].index(end) if end in ids[1:] else 5
    assert lm.tokenizer.decode(ids[1 : 1 + text]) == texts[0]
    assert isinstance(lm.generate("x", source="abc", beams=2, **settings), str)


def test_taps_of_both_stacks_have_names_and_can_be_replaced(lm):
    tokens, source = np.array([[1, 2]]), np.array([[3, 4, 5]])
    names = lm.tap_names()
    assert names.index("encoder.final") < names.index("embed") < names.index("blocks.0.cross_attention.weights")
    assert [name for name in names if name.endswith(".out")] == [f"{each.path}.out" for each in lm.config.sublayers()]
    values = lm.capture(tokens, ["encoder.blocks.*.out", "decoder.blocks.1.cross_attention.weights"], source=source)
    assert values["encoder.blocks.1.feed_forward.out"].shape == (1, 3, 32)
    assert values["decoder.blocks.1.cross_attention.weights"].shape == (1, 4, 2, 3)
    for name in ("encoder.blocks.0.attention.out", "encoder.final", "decoder.blocks.0.cross_attention.out"):
        changed = lm(tokens, replace={name: lambda x: 0 * x}, source=source)
        assert relative_error(changed, lm(tokens, source=source)) > 1e-3, name


def test_sublayers_of_both_stacks_have_their_parameters(lm):
    for bound in transformer.bind(lm.config, lm.params).sublayers(role="feed_forward"):
        own = lm.params["encoder"] if bound.sublayer.path.startswith("encoder.") else lm.params
        kernels = own["blocks"]["main"]["feed_forward"]["up"]["kernel"]
        assert np.array_equal(bound.matrix("up"), kernels[bound.sublayer.layer.number]), bound.sublayer.path
    assert [each.path for each in lm.config.sublayers(layer=1)][0] == "blocks.1.attention"


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda lm: lm([[1]]), "source is missing"),
        (lambda lm: lm([[1]], source=[[1], [2]]), "source has 2 rows"),
        (lambda lm: lm([[1]], source=np.array([[1.5]])), "it must be integers"),
        (lambda lm: lm([[1]], source=[[999]]), "source has token 999"),
        (lambda lm: lm([[1]], source={}), "source={} is not allowed"),
        (lambda lm: lm.generate("a", source="b", beams=2), "temperature=0.9 is not allowed with beams=2"),
        (lambda lm: tiny_model()([[1]], source="a"), "this model has no encoder"),
    ],
)
def test_a_mistake_with_a_source_is_one_line(lm, call, words):
    with pytest.raises(UserError, match=words) as error:
        call(lm)
    assert "\n" not in str(error.value)


ENCODER = "stacks.encoder."


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"blocks": {"main": MAIN}}, "main.layout='pre_norm' .* cross_pre_norm"),
        ({"stacks": {}}, "cross_attention='cross-attention' .* set model.stacks.encoder"),
        ({"stacks": {"second": TWO.stacks["encoder"]}}, "model.stacks='second' .* 'encoder'"),
        ({ENCODER + "width": 24}, "model.stacks.encoder.embedding='shared' .* 'own' with a width of 24"),
        ({ENCODER + "embedding_std": 0.1}, "model.stacks.encoder.embedding_std=0.1"),
        ({ENCODER + "depth": 3, ENCODER + "pattern": ("main",) * 2}, "stacks.encoder.depth=3 .* a multiple of the 2"),
        ({ENCODER + "blocks.main.layout": "cross_pre_norm"}, "encoder.blocks.main.cross_attention='cross-attention'"),
        ({ENCODER + "blocks.main.attention.heads": 5}, "encoder.blocks.main.attention.heads=5"),
    ],
)
def test_a_mistake_in_the_config_is_one_line(changes, words):
    with pytest.raises(UserError, match=words):
        made(changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"source_length": 0}, "source_length=0 .* at least 1"),
        ({"source_length": SOURCE + 1}, "source_length=7 .* at most 6, by model.stacks.encoder.max_length"),
    ],
)
def test_a_run_needs_a_source_length_that_fits(changes, words):
    with pytest.raises(UserError, match=words):
        resolve(replace(tiny_config("gpt2"), model=TWO, **changes))
    with pytest.raises(UserError, match="source_length=4 .* 0 without an encoder"):
        resolve(replace(tiny_config("gpt2"), source_length=4))


def test_kernels_are_chosen_for_both_stacks():
    config = change(tiny_config("gpt2"), "data.objective.kind", "seq2seq")
    config = resolve(replace(config, model=TWO, source_length=SOURCE, sequence_length=LENGTH))
    assert kernel_choices(config).keys() == {("main", "attention"), ("encoder.main", "attention")}
    causal_alone = replace(config, training=replace(config.training, attention_kernel="blocked"))
    with pytest.raises(UserError, match="only full causal attention"):  # which the encoder's is not
        kernel_choices(causal_alone)
