"""What a LanguageModel takes besides token ids, and what it says about itself: text, wildcards, loss, unembed, batches."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xfresearch as xf
from tests.tiny_runs import tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.data.pipeline import stream_tokens
from xfresearch.loading import language_model
from xfresearch.models.traced import traced

ROOT = Path(__file__).parent.parent

TEXT = "def main():\n"
IDS = [list(TEXT.encode())]


def test_a_text_is_its_tokens_everywhere(gpt2):
    np.testing.assert_array_equal(gpt2.tokens(TEXT), IDS)
    np.testing.assert_array_equal(gpt2(TEXT), gpt2(IDS))
    np.testing.assert_array_equal(gpt2(["ab", "cd"]), gpt2([[97, 98], [99, 100]]))
    np.testing.assert_array_equal(gpt2.loss(TEXT), gpt2.loss(IDS))
    np.testing.assert_array_equal(gpt2.capture(TEXT, "embed")["embed"], gpt2.capture(IDS, "embed")["embed"])
    zero = {"embed": jnp.zeros_like}
    np.testing.assert_array_equal(gpt2(TEXT, replace=zero), gpt2(IDS, replace=zero))


def test_mistakes_in_texts(gpt2):
    with pytest.raises(xf.UserError, match=r"texts of \[1, 2\] tokens.*equally many"):
        gpt2(["a", "ab"])
    without = xf.LanguageModel(gpt2.config, gpt2.params, None, gpt2.run)
    with pytest.raises(xf.UserError, match="no tokenizer"):
        without("a")
    with pytest.raises(xf.UserError, match="needs a model with a tokenizer"):
        next(without.batches())
    with pytest.raises(xf.UserError, match="at least 2 tokens"):
        gpt2.loss("a")


def test_the_loss_is_that_of_the_logits(lm):
    """-log softmax in float64, from the logits of the call."""
    logits_BLV = np.asarray(lm(IDS), np.float64)[:, :-1]
    log_p_BLV = logits_BLV - np.log(np.exp(logits_BLV).sum(-1, keepdims=True))
    expected_BL = -np.take_along_axis(log_p_BLV, np.array(IDS)[:, 1:, None], -1)[..., 0]
    assert relative_error(lm.loss(TEXT), expected_BL) < TOLERANCE["float32"]
    replaced_BL = lm.loss(TEXT, replace={"blocks.*.out": lambda x: x})
    assert relative_error(replaced_BL, expected_BL) < TOLERANCE["float32"]
    assert relative_error(lm.loss(TEXT, replace={"embed": jnp.zeros_like}), expected_BL) > 1e-2


def test_unembed_makes_logits_of_the_last_residual_stream(lm):
    values = lm.capture(TEXT, ["blocks.1.*.residual", "final"])
    last = list(values)[-2]
    assert last.startswith("blocks.1.")
    assert relative_error(lm.unembed(values[last]), lm(TEXT)) < TOLERANCE["float32"]
    assert relative_error(lm.unembed(values["final"], normed=True), lm(TEXT)) < TOLERANCE["float32"]


def test_unembed_refuses_a_second_stream():
    lm = tiny_model(model__blocks__main__layout="resi_dual")
    values = lm.capture(TEXT, ["blocks.1.feed_forward.residual", "final"])
    with pytest.raises(xf.UserError, match=r"the head reads x \+ norm\(sum of all outputs\), and not x alone"):
        lm.unembed(values["blocks.1.feed_forward.residual"])
    assert relative_error(lm.unembed(values["final"], normed=True), lm(TEXT)) < TOLERANCE["float32"]


def test_a_wildcard_stands_for_any_part_of_a_name(gpt2):
    pattern = "blocks.*.feed_forward.out"
    names = [f"blocks.{layer}.feed_forward.out" for layer in (0, 1)]
    assert list(gpt2.capture(TEXT, [pattern])) == names and list(gpt2.capture(TEXT, pattern)) == names
    by_name = gpt2(TEXT, replace=dict.fromkeys(names, jnp.zeros_like))
    np.testing.assert_array_equal(gpt2(TEXT, replace={pattern: jnp.zeros_like}), by_name)
    assert relative_error(by_name, gpt2(TEXT)) > 1e-2
    for call in (lambda name: gpt2.capture(TEXT, [name]), lambda name: gpt2(TEXT, replace={name: jnp.zeros_like})):
        with pytest.raises(xf.UserError, match=r"blocks\.\*\.mlp\.out.*no such value"):
            call("blocks.*.mlp.out")
        with pytest.raises(xf.UserError, match=r"no such value; did you mean 'blocks\.0\.feed_forward\.hidden'"):
            call("blocks.0.feed_forwrd.hidden")


def test_batches_are_the_tokens_of_the_corpus_in_order(tmp_path):
    (tmp_path / "notes.txt").write_text("".join(f"line {number}\n" for number in range(300)))
    corpus = f"text_files:{tmp_path}/notes.txt"
    lm = tiny_model(data__corpus=f"('{corpus}',)", evaluation__split="train")
    batches = list(lm.batches(batch_size=4, length=50))
    tokens = stream_tokens(lm.run, "train", corpus, lm.tokenizer)[0]
    assert {len(batch) for batch in batches[:-1]} == {4} and batches[-1].shape[1] == 50
    joined = np.concatenate(batches).reshape(-1)
    np.testing.assert_array_equal(joined, tokens[: len(joined)])
    assert len(tokens) - len(joined) < 50
    assert sum(len(batch) for batch in lm.batches(length=50, limit=6)) == 6
    assert next(lm.batches(corpus, "train")).shape == (8, lm.run.sequence_length)
    assert lm.loss(next(lm.batches(batch_size=2))).shape == (2, lm.run.sequence_length - 1)
    for name, value, low in (("batch_size", 0, 1), ("length", -1, 0), ("limit", -1, 0)):
        with pytest.raises(xf.UserError, match=f"^{name}={value} is not allowed: it must be at least {low}$"):
            next(lm.batches(**{name: value}))


def test_a_replacement_steers_generated_text(gpt2):
    """Greedy text under a replacement equals that of uncached passes with the same replacement."""
    push = 4.0 * jax.random.normal(jax.random.key(0), (gpt2.config.width,))
    replace = {"blocks.0.*.residual": lambda x: x + push}
    ids = list(b"def")
    for _ in range(3):
        ids.append(int(gpt2([ids], replace=replace)[0, -1].argmax()))
    steered = gpt2.generate("def", max_new_tokens=3, temperature=0.0, replace=replace)
    assert steered == gpt2.tokenizer.decode(ids[3:]) != gpt2.generate("def", max_new_tokens=3, temperature=0.0)
    with pytest.raises(xf.UserError, match="must be a function"):
        gpt2.generate("def", replace={"embed": "x"})


@pytest.mark.parametrize("tap", ["key", "value"])
def test_generate_refuses_to_replace_keys_or_values_that_are_one_entry_of_the_cache(tap):
    lm = tiny_model("gpt2", model__blocks__main__attention__value="key", model__blocks__main__attention__bias="()")
    name = f"*.attention.{tap}"
    assert relative_error(lm(TEXT, replace={name: jnp.zeros_like}), lm(TEXT)) > 1e-3
    with pytest.raises(xf.UserError, match="generate cannot replace the key or the value with attention.value='key'"):
        lm.generate("a", 2, temperature=0.0, replace={name: jnp.zeros_like})
    assert lm.generate("a", 2, temperature=0.0, replace={"*.attention.query": jnp.zeros_like}) is not None


def test_jit_grad_and_vmap_work_around_a_pass_with_replacements(gpt2):
    name = "blocks.0.feed_forward.out"

    def last_loss(scale):
        return gpt2.loss(TEXT, replace={name: lambda x: scale * x})[0, -1]

    slope = jax.jit(jax.grad(last_loss))(1.0)
    step = 1e-2
    assert relative_error(slope, (last_loss(1 + step) - last_loss(1 - step)) / (2 * step)) < 1e-2
    each = jax.jit(jax.vmap(last_loss))(jnp.array([0.0, 1.0]))
    assert relative_error(each, [last_loss(0.0), last_loss(1.0)]) < TOLERANCE["float32"]
    assert relative_error(jax.jit(gpt2.loss)(jnp.array(IDS)), gpt2.loss(TEXT)) < TOLERANCE["float32"]


def test_the_representation_is_a_few_lines(lm):
    lines = repr(lm).splitlines()
    assert lines[0] == "LanguageModel" and len(lines) == 6
    assert [line.split()[0] for line in lines[1:]] == ["model", "tokenizer", "trained", "source", "params"]
    assert " parameters" in lines[1] and "ByteTokenizer of 257 ids" in lines[2] and "float32 on 1 x " in lines[5]
    assert "not here" in lines[3]
    trained = xf.LanguageModel(lm.config, lm.params, lm.tokenizer, lm.run, step=7)
    assert f"on python_stdlib, 7 of {lm.run.steps} updates" in repr(trained)


def test_a_replacement_is_a_function_a_value_or_a_patch(gpt2):
    name = "blocks.1.attention.out"
    zero = gpt2(TEXT, replace={name: jnp.zeros_like})
    np.testing.assert_array_equal(gpt2(TEXT, replace={name: 0.0}), zero)
    np.testing.assert_array_equal(gpt2(TEXT, replace={name: xf.Patch(lambda x: 0 * x)}), zero)
    value = gpt2.capture(TEXT, name)[name]
    assert relative_error(gpt2(TEXT, replace={name: value}), gpt2(TEXT)) < TOLERANCE["float32"]
    first = np.arange(len(TEXT))[None] < 4
    (patched,) = gpt2.capture(TEXT, name, replace={name: xf.Patch(arguments=(jnp.float32(0),), where=first)}).values()
    np.testing.assert_array_equal(patched, np.where(first[..., None], 0, value))


def test_replacements_with_the_same_operations_share_a_compiled_program(gpt2, monkeypatch):
    """Whatever arrays they use, and in whatever layer: a loop over layers, heads or examples compiles once."""
    forward, traces = language_model.forward, []
    monkeypatch.setattr(language_model, "forward", lambda *inputs: traces.append(inputs) or forward(*inputs))
    for layer in range(gpt2.config.depth):
        for number in range(3):
            by = jnp.full(gpt2.config.width, number, jnp.float32)
            gpt2(TEXT, replace={f"blocks.{layer}.attention.out": lambda x, by=by: x.at[:, -1].add(by)})
    assert len(traces) == 1


def test_replacements_with_jitted_functions_share_a_compiled_program_if_their_arrays_are_equal(gpt2, monkeypatch):
    """Arrays that a jitted function uses from outside are part of its operations."""
    forward, traces = language_model.forward, []
    monkeypatch.setattr(language_model, "forward", lambda *inputs: traces.append(inputs) or forward(*inputs))
    for number in range(3):
        by = jnp.full(gpt2.config.width, number, jnp.float32)
        gpt2(TEXT, replace={"blocks.0.attention.out": lambda x, by=by: jnp.where(x > by, x, jnp.clip(x, -1, 1))})
    assert len(traces) == 1
    for make in (np.full, jnp.full):
        factors = [make((2,), number, np.float32) for number in (1, 2, 1)]
        one, two, again = (jax.jit(lambda x, by=by: x * by) for by in factors)
        shape = jax.ShapeDtypeStruct((1, 2), jnp.float32)
        one, two, again, same = (traced(xf.Patch(each), shape).function for each in (one, two, again, one))
        assert one == same and hash(one) == hash(same) and one != two
        assert make is jnp.full or one == again
        np.testing.assert_array_equal(two(jnp.ones((1, 2))), [[2, 2]])


def test_replacements_with_other_operations_or_derivatives_are_not_confused(gpt2):
    def with_gradient(factor):
        @jax.custom_vjp
        def same(x):
            return x

        same.defvjp(lambda x: (x, None), lambda _, gradient: (factor * gradient,))
        return same

    def with_tangent(factor):
        same = jax.custom_jvp(lambda x: x)
        same.defjvp(lambda x, tangent: (x[0], factor * tangent[0]))
        return same

    def slope(replacement):
        return jax.grad(lambda shift: gpt2.loss(TEXT, replace={"embed": lambda x: replacement(x + shift)})[0, -1])(0.0)

    one, two = (float(slope(with_gradient(factor))) for factor in (1.0, 2.0))
    assert two == pytest.approx(2 * one, rel=1e-5) and one != 0
    triple = gpt2(TEXT, replace={"embed": lambda x: 3.0 * x})
    assert relative_error(gpt2(TEXT, replace={"embed": lambda x: 2.0 * x}), triple) > 1e-3
    shape = jax.ShapeDtypeStruct((1, 2), jnp.float32)
    functions = [lambda x: x + 1, lambda x: x + 1, lambda x: x + 2, with_tangent(1.0), with_tangent(2.0)]
    first, same, other, one, two = (traced(xf.Patch(function), shape).function for function in functions)
    assert first == same and hash(first) == hash(same) and first != other
    assert one == one and one != two


def test_positions_and_segments_of_a_packed_row(lm):
    """Two documents in one row have the logits of each alone."""
    packed_BL = [[*IDS[0], *IDS[0][:5]]]
    count = len(IDS[0])
    packing = {
        "segments_BL": np.array([[1] * count + [2] * 5]),
        "positions_BL": np.array([[*range(count), *range(5)]]),
    }
    actual_BLV = lm(packed_BL, **packing)
    assert relative_error(actual_BLV[:, count:], lm([IDS[0][:5]])) < TOLERANCE["float32"]
    assert relative_error(actual_BLV[:, count:], lm(packed_BL)[:, count:]) > 1e-3
    name = "blocks.1.*.residual"
    values = [*lm.capture(packed_BL, name, **packing).values()], [*lm.capture([IDS[0][:5]], name).values()]
    for packed, alone in zip(*values, strict=True):
        assert relative_error(packed[:, count:], alone) < TOLERANCE["float32"]


def test_the_names_of_transformer_lens():
    """https://transformerlensorg.github.io: names of a model with rotary positions and a gated feed-forward layer."""
    lm = tiny_model("llama")
    ours = {
        "blocks.0.hook_resid_pre": "blocks.0.attention.before",
        "blocks.0.hook_resid_mid": "blocks.0.feed_forward.before",
        "blocks.1.hook_resid_post": "blocks.1.feed_forward.residual",
        "blocks.0.attn.hook_q": "blocks.0.attention.unrotated_query",
        "blocks.0.attn.hook_rot_k": "blocks.0.attention.key",
        "blocks.0.attn.hook_pattern": "blocks.0.attention.weights",
        "blocks.0.attn.hook_z": "blocks.0.attention.heads",
        "blocks.0.mlp.hook_pre": "blocks.0.feed_forward.pre_activation",
        "blocks.0.mlp.hook_pre_linear": "blocks.0.feed_forward.multiplier",
        "blocks.0.mlp.hook_post": "blocks.0.feed_forward.coefficients",
        "blocks.1.hook_mlp_out": "blocks.1.feed_forward.out",
    }
    theirs, expected = lm.capture(TEXT, ours), lm.capture(TEXT, ours.values())
    assert set(theirs) == set(ours)
    for name, value in theirs.items():
        np.testing.assert_array_equal(value, expected[ours[name]])
    assert list(lm.capture(TEXT, "blocks.*.hook_resid_pre")) == ["blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre"]
    zero = lm(TEXT, replace={"blocks.1.hook_attn_out": jnp.zeros_like})
    np.testing.assert_array_equal(zero, lm(TEXT, replace={"blocks.1.attention.out": jnp.zeros_like}))
    gpt2 = tiny_model("gpt2")
    name = "blocks.0.attn.hook_q"
    np.testing.assert_array_equal(*gpt2.capture(TEXT, [name, "blocks.0.attention.query"]).values())
    with pytest.raises(xf.UserError, match=r"hook_rot_q'.*no such value"):
        gpt2.capture(TEXT, "blocks.0.attn.hook_rot_q")
    parallel = tiny_model(model__blocks__main__layout="parallel")
    with pytest.raises(xf.UserError, match=r"hook_resid_mid'.*no such value"):
        parallel.capture(TEXT, "blocks.0.hook_resid_mid")


NORMALIZED = {"ln1": "blocks.1.attention.", "ln2": "blocks.1.feed_forward.", "ln_final": ""}


@pytest.mark.parametrize(
    "name, changes, exist",
    [
        ("gpt2", {}, ("ln1", "ln2", "ln_final")),
        ("llama", {}, ()),
        ("llama", {"norm_gain": "False"}, ("ln1", "ln2", "ln_final")),
        ("llama", {"norms__feed_forward_in__gain": "False"}, ("ln2",)),
        ("gptj", {}, ("ln1", "ln2", "ln_final")),  # one norm, whose output both sublayers read
        ("gpt2", {"layout": "no_norm_between"}, ("ln1", "ln_final")),
        ("vanilla_2017_decoder", {}, ()),
        ("gpt2", {"norm": "dyt"}, ("ln_final",)),
        ("gpt2", {"layout": "resi_dual"}, ()),
    ],
    ids=str,
)
def test_hook_normalized_is_the_value_of_transformer_lens_or_does_not_exist(name, changes, exist):
    """LayerNorm has this hook after gain and bias, RMSNorm before the gain (transformer_lens/components)."""
    lm = tiny_model(name, **{f"model__blocks__main__{key}": value for key, value in changes.items()})
    for norm, at in NORMALIZED.items():
        theirs = f"{'blocks.1.' if at else ''}{norm}.hook_normalized"
        if norm not in exist:
            with pytest.raises(xf.UserError, match=f"{norm}.hook_normalized'.*no such value"):
                lm.capture(TEXT, theirs)
            continue
        ours = f"{at}in" if at else "final"
        values = lm.capture(TEXT, [theirs, ours])
        np.testing.assert_array_equal(values[theirs], values[ours])
        if name == "llama":
            stream = f"{at}before" if at else "blocks.1.feed_forward.residual"
            x_BLD = np.asarray(lm.capture(TEXT, stream)[stream], np.float64)
            expected = x_BLD / np.sqrt((x_BLD**2).mean(-1, keepdims=True) + lm.config.blocks["main"].norm_epsilon)
            assert relative_error(values[theirs], expected) < 10 * TOLERANCE["float32"]
