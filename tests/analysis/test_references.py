"""Every statistic of the analyses equals its definition in NumPy, in float64 (references.py)."""

import numpy as np
import pytest

from tests.analysis import references
from tests.reference.figures import log_softmax
from tests.tiny_runs import tiny_model
from tests.tolerances import TOLERANCE
from xfresearch import analysis
from xfresearch.analysis.heads import effective_rank, positive_share
from xfresearch.analysis.passes import repeated

TOKENS_NL = np.random.default_rng(0).integers(257, size=(3, 12))
CLOSE = 20 * TOLERANCE["float32"]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def lm(request):
    grouped = {"model__blocks__main__attention__kv_heads": 2} if request.param == "llama" else {}
    return tiny_model(request.param, **grouped)


@pytest.fixture(scope="module")
def values(lm) -> dict:
    return references.recorded(lm, TOKENS_NL)


def test_induction_and_duplicates_on_repeated_tokens(lm):
    data = analysis.attention(lm, TOKENS_NL).data
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
        np.testing.assert_allclose(data["induction"][layer], np.mean(induction, 0), rtol=CLOSE)
        np.testing.assert_allclose(data["duplicate"][layer], np.mean(duplicate, 0), rtol=CLOSE)


def test_effective_rank_and_signs_of_eigenvalues():
    matrix = np.random.default_rng(2).standard_normal((9, 4)) @ np.random.default_rng(3).standard_normal((4, 9))
    s = np.sqrt(np.linalg.eigvalsh(matrix.T @ matrix)[-4:])  # the others are 0
    assert effective_rank(matrix, 4) == pytest.approx(np.prod((s / s.sum()) ** -(s / s.sum())))
    eigenvalues = [2.0, -1.0, 3 + 4j, 3 - 4j]
    block = np.zeros((4, 4))
    block[0, 0], block[1, 1], block[2:, 2:] = 2.0, -1.0, [[3, -4], [4, 3]]
    basis = np.random.default_rng(4).standard_normal((4, 4))
    result = positive_share(basis @ block @ np.linalg.inv(basis))
    assert result == pytest.approx(np.real(eigenvalues).sum() / np.abs(eigenvalues).sum())


def test_routing():
    lm, others_NL = tiny_model("moe"), TOKENS_NL[:2] // 2
    data = analysis.routing(lm, TOKENS_NL, corpora=[others_NL]).data
    tokens_NL = np.concatenate([TOKENS_NL, others_NL])
    values = references.recorded(lm, tokens_NL, ("router_logits", "chosen"))
    for layer in range(lm.config.depth):
        at = f"blocks.{layer}.feed_forward"
        p_NLE = np.exp(log_softmax(values[f"{at}.router_logits"]))
        np.testing.assert_allclose(data["mass"][layer], p_NLE.mean((0, 1)), rtol=CLOSE)
        chosen = values[f"{at}.chosen"].astype(int)
        for corpus, part in enumerate((chosen[:3], chosen[3:])):
            load = [(part == expert).mean() for expert in range(p_NLE.shape[-1])]
            np.testing.assert_allclose(data["corpus_load"][corpus, layer], load)
        first = chosen[..., 0].ravel()
        pairs = {"by_token": tokens_NL, "by_position": [[n * 8 // 12 for n in range(12)]] * 5}
        pairs["by_corpus"] = np.array([0, 0, 0, 1, 1])[:, None] * np.ones((1, 12), int)
        for name, b in pairs.items():
            b, rng = np.unique(b, return_inverse=True)[1].ravel(), np.random.default_rng(0)
            chance = np.mean([references.information(first, rng.permutation(b)) for _ in range(10)])
            assert data[name][layer] == pytest.approx(references.information(first, b) - chance, abs=1e-9), name
