"""The figures of models with an encoder equal their definition, computed from the reference's records, pair by pair and
without padding: so padding has no effect. In float64."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.analysis.test_figures import at_token
from tests.contracts.two_stacks import MODELS
from tests.contracts.variants import in_float64, random_params
from tests.daily import daily
from tests.reference import figures
from tests.tiny_runs import tiny_config
from tests.tolerances import relative_error
from xfresearch import LanguageModel, UserError, analysis
from xfresearch.analysis.lens import by_depth
from xfresearch.analysis.panel import Panel
from xfresearch.analysis.patching import default_sites
from xfresearch.analysis.prompts import Prompt
from xfresearch.analysis.selectable import selectable
from xfresearch.analysis.sequences import Sequences
from xfresearch.analysis.token_classes import CLASSES, classes
from xfresearch.analysis.tracing import effects, normal, numbers_of, of_prompt, sites_of
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.models.context import Source

CLOSE = 1e-10
LENGTHS, SOURCES = (7, 5, 6), (6, 4, 5)  # tokens of each target, with the start id and the last one, and of each source
rng = np.random.default_rng(3)
TARGETS = [rng.integers(64, size=length) for length in LENGTHS]
READ = [rng.integers(64, size=length) for length in SOURCES]
READ[0][2:4] = TARGETS[0][2:4]  # some tokens are copied


def padded(rows) -> tuple[np.ndarray, np.ndarray]:
    tokens, segments = np.full((2, len(rows), max(map(len, rows))), 9)
    segments[:] = 0
    for number, row in enumerate(rows):
        tokens[number, : len(row)], segments[number, : len(row)] = row, 1
    return tokens, segments


ROWS = Sequences(*padded(TARGETS), Source(*padded(READ)))


def made(name: str) -> LanguageModel:
    config = in_float64(MODELS[name])
    return LanguageModel(config, random_params(config, seed=5), None, replace(tiny_config("gpt2"), model=config))


def passes(lm, inputs: bool = True) -> list[figures.Pass]:
    """A pass of the reference for each pair; without the last token if it is only predicted."""
    ends = -1 if inputs else None
    pairs = zip(TARGETS, READ, strict=True)
    return [figures.Pass.of(lm.config, lm.params, t[None, :ends], source=Source(s[None])) for t, s in pairs]


def inside(p: figures.Pass, path: str) -> dict:
    return {name.removeprefix(f"{path}."): value for name, value in p.values.items() if name.startswith(f"{path}.")}


ATTENTION = ["pre-norm", "all-attention", "merged", "low-rank", "experts"]
each_model = pytest.mark.parametrize("name", daily(["all-attention"], ATTENTION))
one_model = pytest.mark.parametrize("name", daily(["pre-norm"], ["pre-norm", "post-norm", "all-attention", "experts"]))


@each_model
def test_attention_and_norms(name, x64):
    lm = made(name)
    lm.tokenizer = ByteTokenizer()
    heads, vectors = analysis.attention(lm, ROWS).data, analysis.norms(lm, ROWS).data
    classes_of(lm, heads)
    for row, p in enumerate(passes(lm)):
        for prefix, stack in (("encoder/", p.encoder(READ[row][None])), ("", p)):
            for number, block, params in stack.layers():
                values = inside(stack, f"blocks.{number}.attention")
                for figure, value in figures.attention(values, block.attention.sink != "none").items():
                    assert relative_error(heads[f"{prefix}{figure}_rows"][row, number], value[0]) < CLOSE, figure
                for figure, value in figures.geometry(values, params["attention"]["key"]["kernel"]).items():
                    assert relative_error(vectors[f"{prefix}{figure}_rows"][row, number], value[0]) < CLOSE, figure
        for number, block, params in p.layers():
            values, sink = inside(p, f"blocks.{number}.cross_attention"), block.cross_attention.sink != "none"
            tokens = TARGETS[row][None, :-1], TARGETS[row][None, 1:], READ[row][None]
            for figure, value in figures.across(values, *tokens, sink).items():
                assert relative_error(heads[f"cross/{figure}_rows"][row, number], value[0]) < CLOSE, figure
            key = params["cross_attention"].get("key", {}).get("kernel")
            key = key if key is not None and key.shape[-1] == values["query"].shape[-1] else None
            for figure, value in figures.geometry(values, key).items():
                assert relative_error(vectors[f"cross/{figure}_rows"][row, number], value[0]) < CLOSE, figure
            hidden = [(~selectable(values["key"][0, :, g]).selects_N).mean() for g in range(values["key"].shape[2])]
            np.testing.assert_allclose(vectors["cross/hidden_keys_rows"][row, number], hidden, atol=CLOSE)
            if row == 0:
                np.testing.assert_allclose(heads["cross/pattern"][number], values["weights"][0], atol=CLOSE)


def classes_of(lm, heads: dict) -> None:
    """The mean weight of the first head on the tokens of each class, over pairs and over the queries that count."""
    class_V = classes(lm.tokenizer, 64)
    kinds = {"": ("attention", 1), "encoder/": ("attention", 1), "cross/": ("cross_attention", 0)}
    for prefix, (name, start) in kinds.items():
        expected = np.zeros(len(CLASSES))
        for row, p in enumerate(passes(lm)):
            stack = p.encoder(READ[row][None]) if prefix == "encoder/" else p
            received_S = stack.values[f"blocks.0.{name}.weights"][0, 0, start:].mean(0)
            tokens = READ[row] if prefix else TARGETS[row][:-1]
            np.add.at(expected, class_V[tokens], received_S / len(TARGETS))
        np.testing.assert_allclose(heads[f"{prefix}by_class"][0, 0], expected, rtol=CLOSE, atol=CLOSE)
        assert heads[f"{prefix}even_by_class"].sum() == pytest.approx(1)


@one_model
def test_lens_and_attribution(name, x64):
    """The parts sum to the relative logit; cross-attention's heads are parts, and the encoder has none."""
    lm = made(name)
    data = analysis.lens(lm, ROWS).data
    for row, p in enumerate(passes(lm, inputs=False)):
        final = figures.log_softmax(p.logits_BLV)[0, :-1]
        for number, end in enumerate(p.ends):
            log_p = figures.log_softmax(figures.stream_logits(p, end))[0, :-1]
            own = np.take_along_axis(log_p, p.tokens_BL[0, 1:, None], 1)
            expected = {"loss": -own.mean(), "agreement": (log_p.argmax(-1) == final.argmax(-1)).mean()}
            expected["divergence"] = (np.exp(final) * (final - log_p)).sum(-1).mean()
            for figure, value in expected.items():
                assert data[f"{figure}_rows"][row, number] == pytest.approx(value, rel=CLOSE), figure
        parts = figures.attribution(p)
        assert set(data["parts"]) == set(parts) and any("cross_attention.0" in part for part in parts)
        given = dict(zip(data["parts"], data["attribution_rows"][row], strict=True))
        for part, value in parts.items():
            assert given[part] == pytest.approx(value[0], rel=CLOSE, abs=CLOSE), part
        assert sum(given.values()) == pytest.approx(figures.relative_logit(p)[0], rel=CLOSE)
    assert not any("encoder" in each for each in data)


@one_model
def test_memories(name, x64):
    """Of both stacks: triggers of an encoder's keys are tokens of the source, and its values predict no token."""
    lm = made(name)
    data, top = analysis.memories(lm, ROWS, top=4).data, 4
    of_rows = passes(lm)
    assert {str(memory).startswith("encoder") for memory in data["memories"]} == {True, False}
    for number, memory in enumerate(map(str, data["memories"])):
        in_encoder = memory.startswith("encoder.")
        length = max(SOURCES) if in_encoder else max(LENGTHS) - 1
        read = [p.encoder(READ[row][None]) if in_encoder else p for row, p in enumerate(of_rows)]
        m = [figures.memory(p, memory.removeprefix("encoder."))[0][0] for p in read]
        m_TK = np.concatenate(m)
        at_T = np.concatenate([row * length + np.arange(len(each)) for row, each in enumerate(m)])
        best_KT = np.sort(m_TK, 0)[::-1][:top].T
        np.testing.assert_allclose(data[f"{memory}/coefficients"], best_KT, rtol=CLOSE, atol=CLOSE)
        np.testing.assert_array_equal(
            data[f"{memory}/triggers"][:, 0], np.where(best_KT[:, 0] > 0, at_T[m_TK.argmax(0)], -1)
        )
        np.testing.assert_allclose(data["active_rows"][:, number], [(each > 0).mean() for each in m], rtol=CLOSE)
        assert data[f"{memory}/value_tokens"].shape[1] == (0 if in_encoder else 5)
        for row, p in enumerate(() if in_encoder else read):
            expected = figures.memories(p, memory)
            np.testing.assert_array_equal(data[f"{memory}/value_tokens"][:, 0], expected.pop("values"))
            for figure in ("composed", "written", "both", "third"):
                known = np.isfinite(data[f"{figure}_rows"][row, number])
                assert not known or data[f"{figure}_rows"][row, number] == pytest.approx(expected[figure][0]), figure


def metric(lm, tokens, source, changes=None) -> float:
    """The logit of token 7 minus that of token 9, at the last token, in the reference."""
    p = figures.Pass.of(lm.config, lm.params, tokens, changes, Source(source))
    return p.logits_BLV[0, -1, 7] - p.logits_BLV[0, -1, 9]


@one_model
def test_patching(name, x64):
    """Values of both stacks of the clean pass, whose source alone differs."""
    lm = made(name)
    prompt, sources = TARGETS[0][None, :3], (READ[0][None, :4], READ[1][None])
    sites = ("encoder.attention.out", "cross_attention.out")
    assert set(sites) < set(default_sites(lm.config))
    data = analysis.patching(lm, prompt, prompt, (7, 9), sites, source=sources).data
    clean = figures.Pass.of(lm.config, lm.params, prompt, source=Source(sources[0])).values
    low = metric(lm, prompt, sources[1])
    span = metric(lm, prompt, sources[0]) - low
    for site in sites:
        prefix, own = ("encoder.", site.removeprefix("encoder.")) if site.startswith("encoder.") else ("", site)
        positions = 4 if prefix else 3
        assert data[site].shape == (2, positions)
        for layer, position in itertools.product(range(2), range(1, positions, 2)):
            tap = f"{prefix}blocks.{layer}.{own}"
            effect = metric(lm, prompt, sources[1], {tap: at_token(clean[tap], position)}) - low
            assert data[site][layer, position] == pytest.approx(effect / span, rel=CLOSE, abs=CLOSE), tap


@one_model
def test_causal_traces(name, x64):
    """The subject stands in the source: P of the reference, corrupted and restored, value by value."""
    lm = made(name)
    lm.tokenizer = type("Start", (), {"decoder_start": 3})()
    prompt, draw = Prompt(tuple(map(int, READ[2])), 1, 2, (7,)), normal(0, 0.5, 2)
    (traced,) = effects(lm, [prompt], 2, draw)
    source, start, size = Source(READ[2][None]), np.array([[3]]), len(READ[2])
    noise_SLD = draw(0, 8, lm.config.encoder.width)[:, :size]
    noise_SLD = noise_SLD * (np.arange(size) >= 1)[:, None] * (np.arange(size) <= 2)[:, None]
    clean = figures.Pass.of(lm.config, lm.params, start, source=source)

    def corrupted(changes) -> float:
        ps = []
        for noise in noise_SLD:
            more = changes | {"encoder.embed": lambda x, noise=noise: x + noise}
            logits = figures.Pass.of(lm.config, lm.params, start, more, source).logits_BLV[0, -1]
            ps.append(np.exp(figures.log_softmax(logits))[7])
        return float(np.mean(ps))

    assert traced.clean == pytest.approx(np.exp(figures.log_softmax(clean.logits_BLV[0, -1]))[7], rel=CLOSE)
    assert traced.corrupted == pytest.approx(corrupted({}), rel=CLOSE)
    stacks = sites_of(lm.config)
    assert {"encoder/stream", "stream", "cross_attention"} <= set(stacks)
    for value, sites in stacks.items():
        taps = {n: (stack, site) for stack, site in sites.items() for n in numbers_of(lm.config)[stack]}
        prefix = "encoder." if value.startswith("encoder/") else ""
        for layer, position in itertools.product(range(2), (0, 2) if of_prompt(lm.config, value) else (0,)):
            window = [layer] if value.endswith("stream") else [n for n in (layer - 1, layer) if n >= 0]
            names = [f"{prefix}blocks.{n}.{taps[n][1]}" for n in window]
            expected = corrupted({tap: at_token(clean.values[tap], position) for tap in names})
            assert traced.restored[value][layer, position] == pytest.approx(expected, rel=CLOSE), (value, layer)


def test_the_tuned_lens_and_features_run_on_pairs(x64):
    lm, noise = made("pre-norm"), np.random.default_rng(1).standard_normal((2, 32, 32))
    translators = {"matrix": jnp.asarray(0.1 * noise), "bias": jnp.zeros((2, 32))}
    result = by_depth(lm.config, lm.params, translators, ROWS)["loss"]
    for row, p in enumerate(passes(lm, inputs=False)):
        log_p = figures.log_softmax(figures.stream_logits(p, p.ends[0], (0.1 * noise[0], 0)))[0, :-1]
        assert result[row, 0] == pytest.approx(-np.take_along_axis(log_p, p.tokens_BL[0, 1:, None], 1).mean(), rel=CLOSE)
    data = analysis.features(lm, ROWS, tap="encoder.final", sizes=(8,), k=2, steps=1, training=ROWS).data
    expected = [-_log_p(lm, row).mean() for row in range(3)]
    np.testing.assert_allclose(data["loss"], expected, rtol=CLOSE)
    encoded = [p.values["encoder.final"][0] for p in passes(lm)]
    f_TF = np.maximum(np.concatenate(encoded) @ data["8/encoder_DF"] + data["8/encoder_bias_F"], 0)
    f_TF = np.where(f_TF > data["8/threshold_F"], f_TF, 0)
    np.testing.assert_allclose(data["8/frequency"], (f_TF > 0).mean(0), rtol=CLOSE)
    assert data["tokens"].shape == (3, max(SOURCES)) and data["8/value_tokens"].shape == (8, 0)


def _log_p(lm, row: int) -> np.ndarray:
    log_p = figures.log_softmax(passes(lm, inputs=False)[row].logits_BLV)[0, :-1]
    return np.take_along_axis(log_p, TARGETS[row][1:, None], 1)


def test_the_panel(x64):
    """Both stacks and cross-attention; of packed rows the first pair."""
    lm = made("pre-norm")
    tokens, segments = padded(TARGETS)
    segments[segments == 0] = 2  # another pair in place of the padding
    source, of_source = padded(READ)
    of_source[of_source == 0] = 2
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments[:, 1:]}
    result = Panel(lm.config, batch | {"source": source, "source_segments": of_source})(lm.params)
    attention, norms = analysis.attention(lm, ROWS).data, analysis.norms(lm, ROWS).data
    for prefix in ("", "encoder/", "cross/"):
        np.testing.assert_allclose(result[f"{prefix}attention_entropy"], attention[f"{prefix}entropy"].mean(1), rtol=CLOSE)
        np.testing.assert_allclose(result[f"{prefix}along_ones"], norms[f"{prefix}projected"], rtol=CLOSE)
    np.testing.assert_allclose(result["cross/next_token"], attention["cross/next"].max(1), rtol=CLOSE)
    np.testing.assert_allclose(result["lens_agreement"], analysis.lens(lm, ROWS).data["agreement"], rtol=CLOSE)
    assert {"induction", "encoder/induction", "encoder/positive_coefficients"} <= set(result)


def test_a_source_is_asked_for_and_refused(x64):
    lm = made("pre-norm")
    with pytest.raises(UserError, match="^source is missing: this model has an encoder"):
        analysis.attention(lm, TARGETS[0][None])
    with pytest.raises(UserError, match="^source is not allowed with data='facts'"):
        analysis.lens(lm, "facts", source="a")
    with pytest.raises(UserError, match="must be in the stack of tap='encoder.final'"):
        analysis.features(lm, ROWS, tap="encoder.final", target="final")
