"""Taps: values inside the model that can be recorded or changed by name, in one compiled program."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.passes import capture, forward, run
from tests.contracts.variants import ALL, NAMED, ROOT, in_float64, marked, model, random_params, tokens_for
from tests.tiny_runs import tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models import layers
from xfresearch.models.context import Context
from xfresearch.models.inputs import tap_shapes
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.tap_aliases import lens_names
from xfresearch.models.taps import Patch, Request, Stacked, captured, request
from xfresearch.runtime.errors import UserError

CONFIG = model()
PARAMS = random_params(CONFIG)
TOKENS_BL = tokens_for(CONFIG)
OUT = "blocks.1.attention.out"
DEFAULT_RUN = [
    *(
        "attention.kind=lambda",
        "attention.kind=differential",
        "layout=resi_dual",
        "layout=skipless",
        "pattern-repeated",
    ),
    *("feed_forward[moe].moe.capacity=0.125", "feed_forward.kind=solu", "memory-layers", "configs/llama.py"),
]
COMPARES = ("softmax", "differential", "lambda")  # the mixers that compare a query with keys


@cache
def shapes_of(name: str) -> dict:
    """The shapes of the taps of a variant, cached: two tests read those of all variants."""
    return tap_shapes(ALL[name], 2, 8)


def logits(replace=None, config=CONFIG, **options):
    return forward(config, random_params(config), tokens_for(config), replace=replace, **options)[0]


def scaled(x, factor):
    return x * factor


def changeable(config) -> list[str]:
    """The taps of values that are numbers. A lambda layer's weights cannot change together with its state."""
    shapes = tap_shapes(config)
    numbers = [name for name, value in shapes.items() if jnp.issubdtype(value.dtype, jnp.floating)]
    return [name for name in numbers if name.removesuffix("weights") + "state" not in shapes or "weights" not in name]


def test_names_are_in_the_order_of_the_computation():
    attention = ["before", "in", "query", "key", "value", "weights", "heads", "raw", "out", "residual"]
    feed_forward = ["before", "in", "pre_activation", "hidden", "coefficients", "raw", "out", "residual"]
    layer = [f"attention.{name}" for name in attention] + [f"feed_forward.{name}" for name in feed_forward]
    names = ["embed", *(f"blocks.{i}.{name}" for i in range(2) for name in layer), "final"]
    assert list(tap_shapes(CONFIG)) == names


@pytest.mark.parametrize("name", ALL)
def test_every_variant_offers_what_each_sublayer_reads_and_writes(name):
    config, shapes = ALL[name], shapes_of(name)
    for layer in layers.layers(config):
        options = config.blocks[layer.block]
        for branch in LAYOUTS[options.layout].branches:
            at = f"blocks.{layer.number}.{branch.name}"
            expected = {"before", "in", "raw", "out", "residual"}
            expected |= {"sum"} if "post" in branch.norms else set()
            carried = branch.connection.carried(LAYOUTS[options.layout].at(config.width, config.depth))
            expected |= {name for name, form in carried.items() if form.tap}
            assert {f"{at}.{value}" for value in expected} <= set(shapes)
            assert shapes[f"{at}.before"].shape == (2, 8, config.width)
            kind = getattr(options, branch.name).kind
            if branch.role == "feed_forward":
                assert {f"{at}.{value}" for value in ("pre_activation", "hidden", "coefficients")} <= set(shapes)
            elif kind != "slots":
                values = {"value", "heads"} | ({"query", "key", "weights"} if kind in COMPARES else set())
                assert {f"{at}.{value}" for value in values} <= set(shapes)
            if kind == "moe":
                values = {"router_logits", "router_probabilities", "chosen", "gates"}
                values |= {"dropped"} if options.feed_forward.moe.capacity and config.causal else set()
                assert {f"{at}.{value}" for value in values} <= set(shapes)
            if kind == "lambda":
                assert f"{at}.state" in shapes


def test_the_table_of_taps_in_the_documentation_is_complete():
    """docs/inside.md names each tap of every variant, with the same name of TransformerLens as the code."""
    lines = (ROOT / "docs" / "inside.md").read_text().split("## The taps")[1].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")][2:]
    lens_of = {name: re.findall(r"`(.+?)`", row[4]) for row in rows for name in re.findall(r"`(.+?)`", row[1])}
    sites = {site.split(".")[-1] for name in ALL for site in shapes_of(name)}
    assert set(lens_of) == sites - {"embed", "final"}
    expected = lens_names(tiny_model("llama").config) | lens_names(tiny_model("gpt2").config)
    pairs = [(name.split(".", 2)[2], tap.split(".")[-1]) for name, tap in expected.items() if tap != "final"]
    assert all(name in lens_of[tap] for name, tap in pairs)
    assert {name for names in lens_of.values() for name in names} == {name for name, _ in pairs}


@pytest.mark.parametrize("how", ["scan", "unroll"])
def test_recording_returns_the_value_and_does_not_change_the_logits(how):
    names = ["final", "blocks.1.attention.query", "blocks.0.feed_forward.hidden"]
    final, query, hidden = capture(CONFIG, PARAMS, TOKENS_BL, names, layers=how)
    assert query.shape == (2, 8, 4, 8) and hidden.shape == (2, 8, 32)
    lm, out = run(CONFIG, PARAMS, TOKENS_BL, record=names, layers=how)
    assert relative_error(lm.logits(out.hidden_BLD), logits(layers=how)) < TOLERANCE["float32"]
    np.testing.assert_allclose(logits(), final @ PARAMS["embed"]["table"].T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", marked(DEFAULT_RUN))
def test_scanned_equals_unrolled_with_every_value_recorded_and_changed_in_one_layer(name, x64):
    config = in_float64(ALL[name])
    params, tokens_BL = random_params(config), tokens_for(config)
    names = list(tap_shapes(config))
    last = f"blocks.{config.depth - 1}."
    patches = {tap: Patch(scaled, (0.9,)) for tap in changeable(config) if tap.startswith(last)}
    actual, expected = (
        jax.jit(lambda params, how=how: capture(config, params, tokens_BL, names, replace=patches, layers=how))(params)
        for how in ("scan", "unroll")
    )
    for tap, a, b in zip(names, actual, expected, strict=True):
        assert relative_error(a, b) < TOLERANCE["float64"] if a.dtype == jnp.float64 else (a == b).all(), tap


def test_the_residual_stream_before_and_after_each_sublayer_is_the_sum_of_all_outputs_so_far():
    names = [
        "embed",
        *(f"blocks.0.{s}.{v}" for s in ("attention", "feed_forward") for v in ("before", "out", "residual")),
    ]
    embed, before, attention, after_attention, middle, feed_forward, after = capture(CONFIG, PARAMS, TOKENS_BL, names)
    np.testing.assert_array_equal(before, embed)
    np.testing.assert_array_equal(middle, after_attention)
    np.testing.assert_allclose(after_attention, embed + attention, rtol=1e-6)
    np.testing.assert_allclose(after, embed + attention + feed_forward, rtol=1e-5, atol=1e-6)


def test_what_a_sublayer_writes_before_its_norm_and_gain(x64):
    for name, norms in (("layout=peri_norm", True), ("layout=skipless", False)):
        config = in_float64(ALL[name])
        params = random_params(config)
        raw, out = capture(config, params, tokens_for(config), ["blocks.1.attention.raw", "blocks.1.attention.out"])
        block = jax.tree.map(lambda leaf: leaf[1], params["blocks"]["main"])
        if norms:
            centred = raw - raw.mean(-1, keepdims=True)
            normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.blocks["main"].norm_epsilon)
            expected = normed * block["attention_norm_out"].get("gain", 1) + block["attention_norm_out"].get("bias", 0)
        else:
            expected = raw * block["attention_gain"]
        assert relative_error(out, expected) < TOLERANCE["float64"]


def test_the_sum_before_a_post_norm_and_the_second_stream_of_resi_dual(x64):
    config = in_float64(ALL["layout=resi_dual"])
    values = (
        "attention.before",
        "attention.out",
        "attention.sum",
        "attention.dual",
        "feed_forward.out",
        "feed_forward.dual",
    )
    names = ["embed", *(f"blocks.0.{value}" for value in values)]
    embed, before, out, total, dual, second, last = capture(config, random_params(config), tokens_for(config), names)
    assert relative_error(total, before + out) < TOLERANCE["float64"]
    assert relative_error(dual, embed + out) < TOLERANCE["float64"]
    assert relative_error(last, embed + out + second) < TOLERANCE["float64"]


def test_replacing_a_value_by_itself_changes_nothing_and_by_zero_changes_the_logits():
    """One compiled program for each site: the layer and the factor are data."""

    traces = []  # JAX's own count is 0 once other tests have filled its cache

    @jax.jit
    def scale(request):
        traces.append(request)
        lm, out = run(CONFIG, PARAMS, TOKENS_BL, layers="scan", taps=request)
        return lm.logits(out.hidden_BLD)

    whole = scale(request(CONFIG))
    for name in tap_shapes(CONFIG):
        same, none = (scale(request(CONFIG, (), {name: Patch(scaled, (jnp.float32(factor),))})) for factor in (1, 0))
        assert relative_error(same, whole) < TOLERANCE["float32"]
        assert not np.allclose(none, whole), name
    sites = {name.split(".", 2)[-1] for name in tap_shapes(CONFIG)}
    assert len(traces) == 1 + len(sites)


def test_a_replaced_value_is_recorded_after_the_replacement():
    (after,) = capture(CONFIG, PARAMS, TOKENS_BL, [OUT], replace={OUT: lambda x: x + 1})
    (before,) = capture(CONFIG, PARAMS, TOKENS_BL, [OUT])
    np.testing.assert_allclose(after, before + 1)


def test_replacing_the_outputs_of_a_layer_by_zero_removes_the_layer():
    config = model({"depth": 1})
    zero = {f"blocks.0.{s}.out": jnp.zeros_like for s in ("attention", "feed_forward")}
    names = ["embed", "blocks.0.feed_forward.residual"]
    embed, residual = capture(config, random_params(config), tokens_for(config), names, replace=zero)
    np.testing.assert_array_equal(embed, residual)


def test_patches_of_a_site_act_on_their_own_layers_in_the_order_given():
    zero, one = jnp.zeros_like, jnp.ones_like
    names = ["blocks.0.attention.out", OUT]
    values = capture(CONFIG, PARAMS, TOKENS_BL, names, replace={names[0]: zero, OUT: one}, layers="scan")
    assert (values[0] == 0).all() and (values[1] == 1).all()


def test_a_patch_sets_values_where_its_mask_is_true():
    at_BL = np.zeros((2, 8), bool)
    at_BL[1, 3] = True
    patch = Patch(arguments=(jnp.float32(5),), where=at_BL)
    (before,), (after,) = (capture(CONFIG, PARAMS, TOKENS_BL, [OUT], replace=r) for r in (None, {OUT: patch}))
    assert (after[1, 3] == 5).all()
    np.testing.assert_array_equal(after[~at_BL], before[~at_BL])


def test_layers_and_positions_of_a_trace_are_a_batch_of_one_program():
    """Patching each layer at each position, as jax.vmap over the layers' slots and the masks, equals a loop."""
    value_BLD = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, CONFIG.width)), jnp.float32)

    def patched(slots_R, where_BL):
        sites = {"attention.out": (Stacked(Patch(arguments=(value_BLD[None],), where=where_BL[None]), slots_R),)}
        lm, out = run(CONFIG, PARAMS, TOKENS_BL, layers="scan", taps=Request(patches={"main": sites}))
        return lm.logits(out.hidden_BLD)

    slots_NR = jnp.array([[0, -1], [-1, 0]])
    where_PBL = jnp.broadcast_to(jnp.eye(8, dtype=bool)[:, None], (8, 2, 8))
    each = jax.vmap(patched, (None, 0))
    actual_NPBLV = jax.jit(jax.vmap(each, (0, None)))(slots_NR, where_PBL)
    for layer, position in ((0, 2), (1, 7)):
        patch = Patch(arguments=(value_BLD,), where=where_PBL[position])
        expected = logits({f"blocks.{layer}.attention.out": patch})
        assert relative_error(actual_NPBLV[layer, position], expected) < TOLERANCE["float32"]


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("how", ["scan", "unroll"])
def test_gradients_for_a_patch_are_those_of_finite_differences(how, remat, x64):
    config = in_float64(CONFIG)

    @jax.jit
    def loss(shift):
        patch = Patch(lambda x, shift: x + shift, (shift,))
        return jnp.square(logits({"blocks.1.attention.heads": patch}, config, layers=how, remat=remat)).sum()

    slope = float(jax.grad(loss)(0.3))
    assert slope == pytest.approx(float(loss(0.3 + 1e-6) - loss(0.3 - 1e-6)) / 2e-6, rel=1e-6)


@pytest.mark.parametrize(
    "new, words",
    [
        (lambda x: x[:1], r"\(1, 8, 32\): it must be \(2, 8, 32\)"),
        (lambda x: None, "shape None"),
        (Patch(arguments=(jnp.ones((3, 32)),)), r"returned shape \(3, 32\)"),
        (Patch(jnp.zeros_like, where=np.ones((2, 7), bool)), r"mask of shape \(2, 7\): it must be \(2, 8, 32\)"),
        (Patch(jnp.zeros_like, where=np.ones((2, 8, 32, 1), bool)), "mask of shape"),
    ],
)
def test_a_replacement_of_another_shape_is_an_error(new, words):
    with pytest.raises(UserError, match=words):
        logits({"blocks.0.feed_forward.hidden": new})


def test_a_context_without_taps_has_only_the_name_of_the_sublayer():
    ctx = Context(positions_BL=None).layer(1, "main").at("attention")
    x = jnp.ones(3)
    assert ctx.tap("query", x) is x and ctx.place == "attention" and not ctx.wants("query") and not ctx.changes("query")


def test_the_heads_of_a_lambda_layer_are_its_state_times_queries_and_its_weights_times_values(x64):
    config = in_float64(model({"blocks.main.attention.kind": "lambda", "blocks.main.attention.lambdas.depth": 2}))
    params, tokens_BL = random_params(config), tokens_for(config)
    names = [f"blocks.1.attention.{value}" for value in ("query", "value", "state", "weights", "heads")]
    q_BLHK, v_BSUV, state_BLKV, a_BHLSU, y_BLHV = capture(config, params, tokens_BL, names)
    assert relative_error(jnp.einsum("blhk,blkv->blhv", q_BLHK, state_BLKV), y_BLHV) < TOLERANCE["float64"]
    assert relative_error(jnp.einsum("bhlsu,bsuv->blhv", a_BHLSU, v_BSUV), y_BLHV) < TOLERANCE["float64"]
    assert (np.triu(a_BHLSU[0, 0, ..., 0], 1) == 0).all()
    for name in names[2:4]:
        (half,) = capture(config, params, tokens_BL, names[4:], replace={name: lambda x: x / 2})
        assert relative_error(half, y_BLHV / 2) < TOLERANCE["float64"]
    both = {name: jnp.zeros_like for name in names[2:4]}
    with pytest.raises(UserError, match="nor while its state is replaced"):
        capture(config, params, tokens_BL, names, replace=both)


def test_the_router_can_be_read_and_overruled(x64):
    config = in_float64(NAMED["moe"])
    params, tokens_BL = random_params(config), tokens_for(config)
    at = "blocks.0.feed_forward."
    moe = config.blocks["main"].feed_forward.moe
    names = [at + value for value in ("router_logits", "router_probabilities", "chosen", "gates")]
    logits_BLE, p_BLE, chosen_BLk, gates_BLk = capture(config, params, tokens_BL, names)
    assert relative_error(p_BLE, jax.nn.softmax(logits_BLE)) < TOLERANCE["float64"]
    np.testing.assert_array_equal(np.sort(chosen_BLk), np.sort(np.argsort(-p_BLE)[..., : moe.top_k]))
    forced = {names[1]: lambda p: jnp.broadcast_to(jnp.arange(1.0, 1 + moe.experts) / 100, p.shape)}
    _, _, chosen_BLk, gates_BLk = capture(config, params, tokens_BL, names, replace=forced)
    assert (chosen_BLk == np.arange(moe.experts)[: -moe.top_k - 1 : -1]).all()
    expected = np.array([moe.experts - i for i in range(moe.top_k)])
    assert relative_error(gates_BLk, np.broadcast_to(expected / expected.sum(), gates_BLk.shape)) < TOLERANCE["float64"]
    same = capture(config, params, tokens_BL, [at + "out"], replace={at + "chosen": lambda x: x})[0]
    other = capture(config, params, tokens_BL, [at + "out"], replace={at + "chosen": lambda x: (x + 1) % moe.experts})[
        0
    ]
    assert relative_error(other, same) > 0.1


def test_choices_above_the_capacity_are_named_and_can_be_kept(x64):
    config = in_float64(ALL["feed_forward[moe].moe.capacity=0.125"])
    params, tokens_BL = random_params(config), tokens_for(config)
    at = "blocks.0.feed_forward."
    dropped_BLk, gates_BLk = capture(config, params, tokens_BL, [at + "dropped", at + "gates"])
    assert dropped_BLk.any() and (gates_BLk[dropped_BLk] == 0).all() and (gates_BLk[~dropped_BLk] > 0).all()
    kept = {at + "dropped": jnp.zeros_like, "blocks.1.feed_forward.dropped": jnp.zeros_like}
    without = in_float64(ALL["feed_forward.kind=moe"])
    expected = forward(without, params, tokens_BL)[0]
    assert relative_error(forward(config, params, tokens_BL, replace=kept)[0], expected) < TOLERANCE["float64"]


def test_values_that_nobody_asks_for_are_not_computed():
    """The weights of all keys exist only in the plain kernel. A pass with other taps has the kernel of a pass without."""
    config = model({"blocks.main.attention.kind": "lambda"})
    params = random_params(config)

    def products(*names) -> int:
        program = jax.make_jaxpr(lambda: capture(config, params, tokens_for(config), names))()
        return str(program).count("dot_general")

    at = "blocks.0.attention."
    assert products() == products("final") == products(at + "query") < products(at + "state")
    assert products() < products(at + "weights")


def test_captures_of_many_layers_are_in_order():
    config = model({"depth": 12})
    names = [f"blocks.{i}.attention.before" for i in range(12)]
    out = run(config, random_params(config), tokens_for(config), record=names, layers="scan")[1]
    assert list(captured(config, out.captures, names)) == names


@pytest.mark.parametrize("how", ["scan", "unroll"])
def test_a_summary_leaves_a_layer_instead_of_its_values(how):
    record = frozenset({("main", "attention.weights"), ("main", "attention.query")})
    taps = Request(record, summary=lambda values: {"sums": values["attention.weights"].sum((1, 2, 3))})
    captures = run(CONFIG, PARAMS, TOKENS_BL, layers=how, taps=taps)[1].captures
    assert list(captures["main"]) == ["sums"]
    np.testing.assert_allclose(captures["main"]["sums"], np.full((2, 2), 4 * 8), rtol=1e-5)
