"""Every figure of the analyses equals its definition, computed from the reference's records alone, on every layout."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import ONE_STACK, in_float64, model, random_params
from tests.daily import daily
from tests.reference import figures
from tests.tiny_runs import tiny_config
from tests.tolerances import relative_error
from tests.variants import LAYOUTS
from xfresearch import LanguageModel, analysis
from xfresearch.analysis.coefficients import memory_names
from xfresearch.analysis.lens import applies as no_lens
from xfresearch.analysis.lens import by_depth
from xfresearch.analysis.memories import adds, memories_of
from xfresearch.analysis.panel import Panel
from xfresearch.analysis.patching import default_sites
from xfresearch.analysis.prompts import Prompt
from xfresearch.analysis.selectable import selectable
from xfresearch.analysis.sequences import Sequences
from xfresearch.analysis.tracing import effects, normal, sites_of

CLOSE = 1e-10
TOKENS_NL = np.random.default_rng(3).integers(64, size=(3, 7))
SIZES = {"width": 16, "depth": 2, "vocab_size": 64, "max_length": 64, "head_scale": "inverse_sqrt_width"}
# Of the block: grouped queries, biases, gains, and a norm with a bias.
BLOCK = {"attention.heads": 4, "attention.kv_heads": 2, "feed_forward.hidden": 12, "norm_bias": True}
SLOTS = {"attention.memory_slots": 3}
FORMS = {
    "dense": {"attention.bias": ("query", "key", "value"), "norm_epsilon": 0.01},
    "slots": SLOTS | {"attention.position": "rope", "attention.sink": "off_by_one", "feed_forward.kind": "relu"},
    "wide": SLOTS | {"attention.memory_activation": "gelu", "attention.output_gate": "head", "norm": "rms"},
    "experts": {"feed_forward.kind": "moe", "feed_forward.moe.experts": 4, "feed_forward.moe.shared": 1, "norm": "derf"},
}


def made(layout: str, form: str) -> LanguageModel:
    """A model in float64, with random gains and biases."""
    needs = LAYOUTS[layout].needs
    options = {name: value for name, value in (BLOCK | FORMS[form] | needs).items() if not hasattr(model(), name)}
    if form == "experts":
        del options["feed_forward.hidden"]
    options = {each: value for name, value in options.items() for each in each_sublayer(layout, name)}
    outside = {name: value for name, value in needs.items() if hasattr(model(), name)}
    changes = SIZES | outside | {"blocks.main.layout": layout} | {f"blocks.main.{name}": v for name, v in options.items()}
    config = in_float64(model(changes))
    run = tiny_config("gpt2")
    return LanguageModel(config, random_params(config, seed=5), None, replace(run, model=config))


def each_sublayer(layout: str, name: str) -> list[str]:
    """An option of 'feed_forward' for each of the layout's feed-forward sublayers, by their names; another one as it is."""
    names = [branch.name for branch in ONE_STACK[layout].branches if branch.role == "feed_forward"]
    return [name.replace("feed_forward", each) for each in names] if name.startswith("feed_forward") else [name]


LACKS = {("all_attention", "experts"), ("attention_only", "experts"), ("fused_output", "wide")}  # such models do not exist
CASES = [case for case in itertools.product(ONE_STACK, FORMS) if case not in LACKS]
DAILY = [("pre_norm", "experts"), ("post_norm", "dense"), ("peri_norm", "slots"), ("all_attention", "slots")]
each_layout = pytest.mark.parametrize("layout, form", daily(DAILY, CASES))
some_layouts = pytest.mark.parametrize("layout, form", daily(DAILY[-2:], CASES))
one_layout = pytest.mark.parametrize("layout, form", daily(DAILY[-1:], CASES))


@each_layout
def test_memories(layout, form, x64):
    lm = made(layout, form)
    if not memories_of(lm.config) or layout == "resi_dual":
        pytest.skip("no memory, or a second stream")
    data, p = analysis.memories(lm, TOKENS_NL, top=4).data, figures.Pass.of(lm.config, lm.params, TOKENS_NL)
    assert list(data["memories"]) == memories_of(lm.config)
    for number, memory in enumerate(data["memories"]):
        expected = figures.memories(p, str(memory))
        np.testing.assert_array_equal(data[f"{memory}/value_tokens"][:, 0], expected.pop("values"))
        for name, value_B in expected.items():
            known = adds(lm.config, memory) or name in ("active", "composed")
            np.testing.assert_allclose(data[f"{name}_rows"][:, number], value_B if known else np.nan, err_msg=name)
        m_TK = figures.memory(p, str(memory))[0].reshape(TOKENS_NL.size, -1)
        best_KT = np.sort(m_TK, 0)[::-1][:4].T
        np.testing.assert_allclose(data[f"{memory}/coefficients"], best_KT, rtol=CLOSE, atol=CLOSE)
        at_KT = data[f"{memory}/triggers"]
        np.testing.assert_array_equal(at_KT >= 0, best_KT > 0)
        picked = np.where(at_KT >= 0, np.take_along_axis(m_TK.T, at_KT, 1), 0)
        np.testing.assert_allclose(picked, np.maximum(best_KT, 0), rtol=CLOSE, atol=CLOSE)


@some_layouts
def test_lens_and_attribution(layout, form, x64):
    lm = made(layout, form)
    if reason := no_lens(lm.config):
        pytest.skip(reason)
    data, p = analysis.lens(lm, TOKENS_NL).data, figures.Pass.of(lm.config, lm.params, TOKENS_NL)
    for name, value_BN in figures.lens(p).items():
        assert relative_error(data[f"{name}_rows"], value_BN) < CLOSE, name
    expected = figures.attribution(p)
    assert set(data["parts"]) == set(expected)
    assert relative_error(data["attribution_rows"].T, np.stack([expected[part] for part in data["parts"]])) < CLOSE
    assert relative_error(sum(expected.values()), figures.relative_logit(p)) < CLOSE
    probability_NLV = np.exp([figures.log_softmax(figures.stream_logits(p, end))[0] for end in p.ends])
    np.testing.assert_array_equal(data["token"], probability_NLV.argmax(-1))
    np.testing.assert_allclose(data["probability"], probability_NLV.max(-1), rtol=CLOSE)
    for layer, (column, name) in itertools.product(range(lm.config.depth), enumerate(data["sublayers"])):
        of_sublayer = [value for part, value in expected.items() if f"{part}.".startswith(f"blocks.{layer}.{name}.")]
        given = np.nan_to_num(data["by_sublayer"])[layer, column]
        assert given == pytest.approx(sum(value.mean() for value in of_sublayer), abs=CLOSE)  # of none: without a skip
    for memory in memory_names(lm.config):
        if f"{memory}.keys" in data:
            assert relative_error(data[f"{memory}.keys"], figures.of_keys(p, memory).mean(0)) < CLOSE, memory


@one_layout
def test_attention_and_norms(layout, form, x64):
    lm = made(layout, form)
    heads, vectors = analysis.attention(lm, TOKENS_NL).data, analysis.norms(lm, TOKENS_NL).data
    p = figures.Pass.of(lm.config, lm.params, TOKENS_NL)
    for number, block, params in p.layers():
        at = f"blocks.{number}.attention."
        values = {name.removeprefix(at): value for name, value in p.values.items() if name.startswith(at)}
        for name, value in figures.attention(values, block.attention.sink != "none").items():
            assert relative_error(heads[f"{name}_rows"][:, number], value) < CLOSE, name
        for name, value in figures.geometry(values, params["attention"]["key"]["kernel"]).items():
            assert relative_error(vectors[f"{name}_rows"][:, number], value) < CLOSE, name
        for name, x in (("hidden_before", values["before"]), ("hidden_after", values["in"])):
            expected = [(~selectable(row).selects_N).mean() for row in x]
            np.testing.assert_allclose(vectors[f"{name}_rows"][:, number], expected, atol=CLOSE)


@pytest.mark.parametrize("layout, form", daily(DAILY[:1], CASES))
def test_the_panel(layout, form, x64):
    lm = made(layout, form)
    result = Panel(lm.config, {"tokens": TOKENS_NL})(lm.params)
    half = TOKENS_NL.shape[1] // 2
    random_BL = np.random.default_rng(0).integers(64, size=(len(TOKENS_NL), half))
    rows = TOKENS_NL, np.concatenate([random_BL, random_BL], 1)
    expected = figures.panel(*(figures.Pass.of(lm.config, lm.params, each) for each in rows))
    assert set(result) == set(expected) - ({"lens_agreement"} if no_lens(lm.config) else set())
    for name, value_N in result.items():
        np.testing.assert_allclose(value_N, expected[name], rtol=CLOSE, err_msg=name)


@pytest.mark.parametrize("layout", daily(["pre_norm"], [layout for layout, form in CASES if form == "experts"]))
def test_routing(layout, x64):
    lm = made(layout, "experts")
    data, p = analysis.routing(lm, TOKENS_NL).data, figures.Pass.of(lm.config, lm.params, TOKENS_NL)
    params_N = [params for _, _, params in p.layers()]
    for number, mixture in enumerate(lm.config.sublayers(has="mixture")):
        at = f"{mixture.path}."
        values = {name.removeprefix(at): value for name, value in p.values.items() if name.startswith(at)}
        bias = params_N[mixture.layer.number][mixture.name].get("router_bias", 0.0)
        for name, value in figures.routing(values, bias).items():
            given = data[f"{name}_rows"][:, number] if f"{name}_rows" in data else data[name][number]
            assert relative_error(given, value) < CLOSE, name


@one_layout
def test_the_tuned_lens(layout, form, x64):
    lm, rng = made(layout, form), np.random.default_rng(1)
    if layout == "resi_dual":
        pytest.skip("a second stream")
    N, D = lm.config.depth, lm.config.width
    matrix, bias = 0.2 * rng.standard_normal((N, D, D)), rng.standard_normal((N, D))
    result = by_depth(lm.config, lm.params, {"matrix": jnp.asarray(matrix), "bias": jnp.asarray(bias)}, Sequences(TOKENS_NL))
    for name, value_BN in figures.lens(figures.Pass.of(lm.config, lm.params, TOKENS_NL), (matrix, bias)).items():
        assert relative_error(result[name], value_BN) < CLOSE, name


def metric(lm, tokens_BL, changes=None) -> float:
    """The logit of token 7 minus that of token 9, at the last token, in the reference."""
    logits = figures.Pass.of(lm.config, lm.params, tokens_BL, changes).logits_BLV[0, -1]
    return logits[7] - logits[9]


def at_token(value_BL, position: int):
    """A change of a recorded value, [L, ...] or [H, L, M] of slots in the softmax: at one token it is that of `value_BL`."""
    where = [slice(None)] * (value_BL.ndim == 4)

    def changed(x):
        x = x.copy()
        x[(*where, position)] = value_BL[0][(*where, position)]
        return x

    return changed


@one_layout
def test_patching(layout, form, x64):
    """Exact effects, gradients as differences of the reference, and direct paths to the head."""
    lm = made(layout, form)
    clean, corrupted = TOKENS_NL[:1, :4], TOKENS_NL[1:2, :4]
    sites = default_sites(lm.config)
    data = analysis.patching(lm, clean, corrupted, (7, 9)).data
    of_clean, of_corrupted = (figures.Pass.of(lm.config, lm.params, each).values for each in (clean, corrupted))
    low, span = metric(lm, corrupted), metric(lm, clean) - metric(lm, corrupted)
    for site, layer, position in itertools.product(sites, range(lm.config.depth), range(clean.shape[1])):
        tap = f"blocks.{layer}.{site}"
        effect = metric(lm, corrupted, {tap: at_token(of_clean[tap], position)}) - low
        assert data[site][layer, position] == pytest.approx(effect / span, rel=CLOSE, abs=CLOSE), tap
        step = 1e-4 * (of_clean[tap] - of_corrupted[tap])
        both = [metric(lm, corrupted, {tap: at_token(of_corrupted[tap] + sign * step, position)}) for sign in (1, -1)]
        slope = np.subtract(*both) / 2e-4 / span
        assert data[f"attribution/{site}"][layer, position] == pytest.approx(slope, rel=1e-5, abs=1e-6), tap
    outs = [tap for tap in lm.tap_names() if tap.endswith(".out")]
    kept = {tap: lambda x, tap=tap: of_corrupted[tap][0] for tap in outs}
    for tap in outs:
        layer, name = int(tap.split(".")[1]), tap.split(".")[2]
        expected = metric(lm, corrupted, kept | {tap: lambda x, tap=tap: of_clean[tap][0]}) - low
        column = list(lm.config.blocks["main"].sublayers).index(name)
        assert data["paths"][layer, column] == pytest.approx(expected / span, rel=CLOSE, abs=CLOSE), tap


@one_layout
def test_causal_traces(layout, form, x64):
    """P of the reference, corrupted and restored, value by value."""
    lm, length = made(layout, form), 5
    prompt = Prompt(tuple(int(token) for token in TOKENS_NL[0, :length]), 1, 2, (7,))
    draw = normal(0, 0.5, 2)
    (traced,) = effects(lm, [prompt], 2, draw)
    tokens_BL, noise_SLD = TOKENS_NL[:1, :length], draw(0, 8, lm.config.width)[:, :length]
    noise_SLD = noise_SLD * (np.arange(length) >= 1)[:, None] * (np.arange(length) <= 2)[:, None]
    clean = figures.Pass.of(lm.config, lm.params, tokens_BL)

    def probability(changes=None) -> float:
        logits = figures.Pass.of(lm.config, lm.params, tokens_BL, changes).logits_BLV[0, -1]
        return np.exp(figures.log_softmax(logits))[7]

    def corrupted(changes) -> float:
        return np.mean([probability(changes | {"embed": lambda x, noise=noise: x + noise}) for noise in noise_SLD])

    assert traced.clean == pytest.approx(probability(), rel=CLOSE)
    assert traced.corrupted == pytest.approx(corrupted({}), rel=CLOSE)
    for value, sites in sites_of(lm.config).items():
        for layer, position in itertools.product(range(lm.config.depth), range(1, length)):
            window = [layer] if value == "stream" else [n for n in (layer - 1, layer) if n >= 0]
            taps = [f"blocks.{n}.{sites['main']}" for n in window]
            changes = {tap: at_token(clean.values[tap], position) for tap in taps}
            assert traced.restored[value][layer, position] == pytest.approx(corrupted(changes), rel=CLOSE), (value, layer)
