"""Every statistic of the analyses equals its definition in NumPy, in float64 (references.py)."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.analysis import references
from tests.tiny_runs import tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch import analysis
from xfresearch.analysis.attention import effective_rank, positive_share
from xfresearch.analysis.lens import by_depth
from xfresearch.analysis.patching import attribution, effects
from xfresearch.analysis.running import repeated
from xfresearch.analysis.selectable import selectable

TOKENS_NL = np.random.default_rng(0).integers(257, size=(3, 12))
CLOSE = 20 * TOLERANCE["float32"]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def lm(request):
    grouped = {"model__blocks__main__attention__kv_heads": 2} if request.param == "llama" else {}
    return tiny_model(request.param, **grouped)


@pytest.fixture(scope="module")
def values(lm) -> dict:
    return references.recorded(lm, TOKENS_NL)


def test_the_lens_and_the_parts_of_the_prediction(lm, values):
    found = analysis.lens(lm, TOKENS_NL).data
    logits_BLV = np.asarray(lm(TOKENS_NL), np.float64)
    for layer in range(lm.config.depth):
        expected = references.lens(lm, values[f"blocks.{layer}.feed_forward.residual"], logits_BLV, TOKENS_NL)
        for name, value_B in expected.items():
            np.testing.assert_allclose(found[f"{name}_rows"][:, layer], value_B, rtol=CLOSE, atol=1e-6, err_msg=name)
            assert found[name][layer] == pytest.approx(found[f"{name}_rows"][:, layer].mean())
        p_LV = np.exp(references.log_softmax(references.final_norm(lm, values[f"blocks.{layer}.feed_forward.residual"][0])
                                             @ references.head(lm).T))  # fmt: skip
        np.testing.assert_array_equal(found["token"][layer], p_LV.argmax(-1))
        np.testing.assert_allclose(found["probability"][layer], p_LV.max(-1), rtol=CLOSE)
    parts = references.attribution(lm, values, TOKENS_NL)
    assert set(found["parts"]) == set(parts)
    scale = np.abs(list(parts.values())).max()
    for column, name in enumerate(found["parts"]):
        assert np.abs(found["attribution_rows"][:, column] - parts[name]).max() < CLOSE * scale, name
    means = {name: value.mean() for name, value in parts.items()}
    for layer in range(lm.config.depth):
        heads = [means[f"blocks.{layer}.attention.{h}"] for h in range(lm.config.blocks["main"].attention.heads)]
        np.testing.assert_allclose(found["by_head"][layer], heads, atol=CLOSE * scale)
        both = [sum(heads) + means[f"blocks.{layer}.attention.rest"], means[f"blocks.{layer}.feed_forward"]]
        np.testing.assert_allclose(found["by_sublayer"][layer], both, atol=CLOSE * scale)
        v_FD = np.asarray(lm.memory(layer, "feed_forward").writes, np.float64)
        keys_F = references.key_attribution(lm, values, TOKENS_NL, layer, v_FD)
        assert relative_error(found[f"blocks.{layer}.feed_forward.keys"], keys_F) < CLOSE


def test_translators_of_the_tuned_lens_are_applied_to_the_stream(lm, values):
    rng = np.random.default_rng(1)
    N, D = lm.config.depth, lm.config.width
    translators = {"matrix": 0.2 * rng.standard_normal((N, D, D)), "bias": rng.standard_normal((N, D))}
    found = by_depth(lm.config, lm.params, {name: jnp.asarray(x, jnp.float32) for name, x in translators.items()}, TOKENS_NL)
    logits_BLV = np.asarray(lm(TOKENS_NL), np.float64)
    for layer in range(N):
        stream = values[f"blocks.{layer}.feed_forward.residual"]
        moved = stream + np.einsum("bld,de->ble", stream, translators["matrix"][layer]) + translators["bias"][layer]
        for name, value_B in references.lens(lm, moved, logits_BLV, TOKENS_NL).items():
            np.testing.assert_allclose(found[name][:, layer], value_B, rtol=10 * CLOSE, atol=1e-6, err_msg=name)


def test_induction_and_duplicates_on_repeated_tokens(lm):
    found = analysis.attention(lm, TOKENS_NL).data
    tokens_BL = repeated(lm, 6)
    assert all(len(set(row[:6])) == 6 and (row[:6] == row[6:]).all() for row in tokens_BL)
    for layer in range(lm.config.depth):
        w_BHLS = np.asarray(lm.capture(tokens_BL, f"blocks.{layer}.attention.weights").popitem()[1], np.float64)
        induction, duplicate = [], []
        for b, row in enumerate(tokens_BL):
            for n in range(6, 12):
                (last,) = [s for s in range(n) if row[s] == row[n]]
                duplicate.append(w_BHLS[b, :, n, last])
                induction.append(w_BHLS[b, :, n, last + 1])
        np.testing.assert_allclose(found["induction"][layer], np.mean(induction, 0), rtol=CLOSE)
        np.testing.assert_allclose(found["duplicate"][layer], np.mean(duplicate, 0), rtol=CLOSE)


def test_effective_rank_and_signs_of_eigenvalues():
    matrix = np.random.default_rng(2).standard_normal((9, 4)) @ np.random.default_rng(3).standard_normal((4, 9))
    s = np.sqrt(np.linalg.eigvalsh(matrix.T @ matrix)[-4:])  # the others are 0
    assert effective_rank(matrix, 4) == pytest.approx(np.prod((s / s.sum()) ** -(s / s.sum())))
    eigenvalues = [2.0, -1.0, 3 + 4j, 3 - 4j]
    block = np.zeros((4, 4))
    block[0, 0], block[1, 1], block[2:, 2:] = 2.0, -1.0, [[3, -4], [4, 3]]
    basis = np.random.default_rng(4).standard_normal((4, 4))
    found = positive_share(basis @ block @ np.linalg.inv(basis))
    assert found == pytest.approx(np.real(eigenvalues).sum() / np.abs(eigenvalues).sum())


def test_geometry_of_inputs_queries_and_keys(lm, values):
    found = analysis.norms(lm, TOKENS_NL).data
    ones = np.ones(lm.config.width) / np.sqrt(lm.config.width)

    def degrees(x) -> float:
        cosines = [abs(v @ ones) / np.linalg.norm(v) for v in x.reshape(-1, len(ones))]
        return np.mean(np.degrees(np.arccos(cosines)))

    for layer in range(lm.config.depth):
        at = f"blocks.{layer}.attention"
        before, after = values[f"{at}.before"], values[f"{at}.in"]
        assert found["angle_before"][layer] == pytest.approx(degrees(before), rel=CLOSE)
        assert found["angle_after"][layer] == pytest.approx(degrees(after), rel=CLOSE)
        along = [(v @ ones) ** 2 / (v @ v) for v in before.reshape(-1, len(ones))]
        assert found["projected"][layer] == pytest.approx(np.mean(along), rel=CLOSE)
        sizes = [[np.linalg.norm(v - (v @ ones) * ones) for v in row] for row in before]
        assert found["spread"][layer] == pytest.approx(np.mean([np.std(row) / np.mean(row) for row in sizes]), rel=CLOSE)
        for name, x in (("hidden_before", before), ("hidden_after", after)):
            assert found[name][layer] == np.mean([(~selectable(row).selects_N).mean() for row in x])
        key_DGK = references.parameter(lm, "blocks/main/attention/key/kernel")[layer]
        query_BLHK = values.get(f"{at}.unrotated_query", values[f"{at}.query"])
        share = query_BLHK.shape[2] // key_DGK.shape[1]
        for h in range(query_BLHK.shape[2]):
            as_input = query_BLHK[:, :, h] @ key_DGK[:, h // share].T
            assert found["angle_query"][layer, h] == pytest.approx(degrees(as_input), rel=CLOSE)


def test_routing():
    lm, others_NL = tiny_model("moe"), TOKENS_NL[:2] // 2
    found = analysis.routing(lm, TOKENS_NL, corpora=[others_NL]).data
    tokens_NL = np.concatenate([TOKENS_NL, others_NL])
    values = references.recorded(lm, tokens_NL, ("router_logits", "chosen"))
    for layer in range(lm.config.depth):
        at = f"blocks.{layer}.feed_forward"
        p_NLE = np.exp(references.log_softmax(values[f"{at}.router_logits"]))
        np.testing.assert_allclose(found["mass"][layer], p_NLE.mean((0, 1)), rtol=CLOSE)
        chosen = values[f"{at}.chosen"].astype(int)
        for corpus, part in enumerate((chosen[:3], chosen[3:])):
            load = [(part == expert).mean() for expert in range(p_NLE.shape[-1])]
            np.testing.assert_allclose(found["corpus_load"][corpus, layer], load)
        first = chosen[..., 0].ravel()
        pairs = {"by_token": tokens_NL, "by_position": [[n * 8 // 12 for n in range(12)]] * 5}
        pairs["by_corpus"] = np.array([0, 0, 0, 1, 1])[:, None] * np.ones((1, 12), int)
        for name, b in pairs.items():
            b, rng = np.unique(b, return_inverse=True)[1].ravel(), np.random.default_rng(0)
            chance = np.mean([references.information(first, rng.permutation(b)) for _ in range(10)])
            assert found[name][layer] == pytest.approx(references.information(first, b) - chance, abs=1e-9), name


def test_effects_of_patching_are_shares_of_the_difference_of_the_prompts():
    lm, site = tiny_model("gpt2"), "attention.out"
    clean, corrupted = TOKENS_NL[:1, :5], TOKENS_NL[1:2, :5]
    found = analysis.patching(lm, clean, corrupted, (7, 9), (site,)).data

    def metric(tokens) -> float:
        logits = np.asarray(lm(tokens), np.float64)[0, -1]
        return logits[7] - logits[9]

    span = metric(clean) - metric(corrupted)
    expected = (effects(lm, clean, corrupted, site, (7, 9)) - metric(corrupted)) / span  # effects: in test_patching.py
    assert relative_error(found[site], expected) < CLOSE
    slopes = attribution(lm, clean, corrupted, site, (7, 9))
    assert relative_error(found[f"attribution/{site}"], slopes / span) < CLOSE
    assert found["clean"] == pytest.approx(metric(clean), rel=CLOSE)
    pair = found[site].ravel(), found[f"attribution/{site}"].ravel()
    centred = [x - x.mean() for x in pair]
    r = centred[0] @ centred[1] / np.sqrt((centred[0] @ centred[0]) * (centred[1] @ centred[1]))
    assert found[f"correlation/{site}"] == pytest.approx(r)
