"""The closed forms of docs/questions/cross_attention.md, in NumPy and float64: the matrices of cross-attention as one
matrix, as the identity, and as one matrix for two uses."""

from dataclasses import replace

import numpy as np
import pytest

from tests.contracts.two_stacks import CROSS, ENCODER, LENGTH, NARROW, SOURCE, TWO, made
from tests.reference.cross import cross_attention
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models.mixers.softmax.cross import CrossConfig
from xfresearch.run_config.closed_form import costs

D, W, H, K, L, S = 12, 10, 3, 4, 5, 9  # W: width of the encoder; D = H K
EXACT = TOLERANCE["float64"]
INVERTED = 1e3 * EXACT  # where a random matrix is inverted, which has a condition of some hundreds
OTHER = 1e-3  # and more, if a form is another function
NAMES = {"query": (D, H, K), "key": (W, H, K), "value": (W, H, K), "output": (H, K, D)}


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def parameters(rng, names=NAMES, biased=()) -> dict:
    """{matrix: its kernel, and its bias if it has one}."""
    p = {name: {"kernel": rng.standard_normal(shape)} for name, shape in names.items()}
    for name in biased:
        p[name]["bias"] = rng.standard_normal(p[name]["kernel"].shape[1:] if name != "output" else D)
    return p


def attend(p, x_LD, s_SW, heads=H, size=K, **options):
    """y [L, D] of the reference. Logits are scaled as those of heads of K."""
    a = CrossConfig(heads=heads, head_size=size, kv_heads=heads, scale=K**-0.5, **options)
    block = replace(TWO.blocks["main"], cross_attention=a)
    return cross_attention(p, x_LD, block, np.ones(len(x_LD)), (s_SW, np.ones(len(s_SW))))


def streams(rng):
    return rng.standard_normal((L, D)), rng.standard_normal((S, W))


def product(p):
    """W_Q W_K^T of each head [D, H, W]."""
    return np.einsum("dhk,ehk->dhe", p["query"]["kernel"], p["key"]["kernel"])


def without(p, *names):
    return {name: part for name, part in p.items() if name not in names}


def test_query_and_key_are_one_matrix_of_rank_k_for_each_head(rng):
    p, (x_LD, s_SW) = parameters(rng), streams(rng)
    merged = without(p, "key") | {"query": {"kernel": product(p)}}
    assert relative_error(attend(merged, x_LD, s_SW, query="merged", key="identity_whole"), attend(p, x_LD, s_SW)) < EXACT
    assert [np.linalg.matrix_rank(product(p)[:, h]) for h in range(H)] == [K] * H


def test_k_squared_numbers_of_a_head_change_nothing(rng):
    """The derivative of W_Q W_K^T by its K (D + W) numbers has rank K (D + W - K)."""
    q_DK, k_WK = rng.standard_normal((D, K)), rng.standard_normal((W, K))
    rows = [np.outer(np.eye(D)[d], k_WK[:, k]).ravel() for d in range(D) for k in range(K)]
    rows += [np.outer(q_DK[:, k], np.eye(W)[e]).ravel() for e in range(W) for k in range(K)]
    assert np.linalg.matrix_rank(np.array(rows)) == K * (D + W - K)


def test_biases_of_queries_and_keys_when_merged(rng):
    """b_Q becomes b_Q W_K^T, and b_K is cancelled by the softmax, unless a softcap or a sink stands between."""
    p, (x_LD, s_SW) = parameters(rng, biased=("query", "key", "value", "output")), streams(rng)
    bias_HW = np.einsum("hk,ehk->he", p["query"]["bias"], p["key"]["kernel"])
    merged = without(p, "key") | {"query": {"kernel": product(p), "bias": bias_HW}}
    expected = attend(p, x_LD, s_SW)
    assert relative_error(attend(merged, x_LD, s_SW, query="merged", key="identity_whole"), expected) < EXACT
    for changes in ({"softcap": 1.0}, {"sink": "off_by_one"}):
        exact = attend(p, x_LD, s_SW, **changes)
        assert relative_error(attend(merged, x_LD, s_SW, query="merged", key="identity_whole", **changes), exact) > OTHER


@pytest.mark.parametrize("changes", [{"qk_norm": "rms"}, {"clip": 1.0}])
def test_norms_and_clipping_leave_no_matrix_between_the_streams(changes, rng):
    """x W_Q W_K^T s^T is linear in x. Twice the stream, with half the scale, gives the same weights: here it does not."""
    p, (x_LD, s_SW) = parameters(rng), streams(rng)
    p |= {f"{name}_norm": {"scale": np.ones(K)} for name in ("query", "key")}

    def attended(factor, **options):
        a = CrossConfig(heads=H, head_size=K, kv_heads=H, scale=K**-0.5 / factor, **options)
        block = replace(TWO.blocks["main"], cross_attention=a)
        return cross_attention(p, factor * x_LD, block, np.ones(L), (s_SW, np.ones(S)))

    assert relative_error(attended(2), attended(1)) < EXACT
    assert relative_error(attended(2, **changes), attended(1, **changes)) > OTHER


@pytest.mark.parametrize("width, encoder, heads, size", [(32, 24, 4, 8), (32, 24, 1, 32), (32, 8, 2, 16), (32, 32, 2, 16)])
def test_parameters_and_flops_of_the_pair_and_of_the_merged_matrix(width, encoder, heads, size):
    """Pair: H K (D + W) weights, 2 H K (D + S) FLOPs for a token of the decoder and 2 H W K for one of the source. Merged:
    H D W weights, 2 H W (D + S) FLOPs, and none for the source. It has fewer weights if K > D W / (D + W)."""
    changes = NARROW | {ENCODER + "width": encoder, CROSS + "heads": heads, CROSS + "head_size": size}
    pair, merged = (made(changes | {CROSS + "query": query}) for query in ("learned", "merged"))
    layers = pair.depth
    weights = heads * size * (width + encoder), heads * width * encoder
    assert costs(merged).parameters - costs(pair).parameters == layers * (weights[1] - weights[0])
    assert (weights[1] < weights[0]) == (size > width * encoder / (width + encoder))
    of_pair = 2 * heads * size * (width + SOURCE) * LENGTH + 2 * heads * encoder * size * SOURCE
    of_merged = 2 * heads * encoder * (width + SOURCE) * LENGTH
    actual = [costs(each, LENGTH).flops_per_token * LENGTH for each in (pair, merged)]
    assert actual[1] - actual[0] == pytest.approx(layers * (of_merged - of_pair), rel=1e-12)


def test_identity_queries_that_see_the_whole_stream_lose_nothing(rng):
    """x (W_K W_Q^T s^T): the matrix of the keys takes that of the queries, D x W for each head."""
    p, (x_LD, s_SW) = parameters(rng), streams(rng)
    keys = {"key": {"kernel": np.moveaxis(product(p), 2, 0).swapaxes(1, 2)}}
    actual = attend(without(p, "query") | keys, x_LD, s_SW, query="identity_whole")
    assert relative_error(actual, attend(p, x_LD, s_SW)) < EXACT


def test_one_head_of_the_width_needs_no_query_matrix(rng):
    names = {name: tuple({H: 1, K: D}.get(size, size) for size in shape) for name, shape in NAMES.items()}
    p, (x_LD, s_SW) = parameters(rng, names), streams(rng)
    keys = {"key": {"kernel": np.swapaxes(product(p), 0, 2)}}
    one = {"heads": 1, "size": D}
    actual = attend(without(p, "query") | keys, x_LD, s_SW, query="identity", **one)
    assert relative_error(actual, attend(p, x_LD, s_SW, **one)) < EXACT


def test_slices_of_the_stream_as_queries_lose_all_that_heads_read_elsewhere(rng):
    """With W_Q = I head h has W K numbers, in rows h K to h K + K of D x W, and no others. The best W_K leaves the rest."""
    matrix_DHW = product(parameters(rng))
    for h in range(H):
        rows = np.eye(D)[:, h * K : (h + 1) * K]
        best_KW = np.linalg.lstsq(rows, matrix_DHW[:, h], rcond=None)[0]
        left_DW = matrix_DHW[:, h] - rows @ best_KW
        elsewhere = np.delete(matrix_DHW[:, h], range(h * K, h * K + K), 0)
        assert np.linalg.norm(left_DW) == pytest.approx(np.linalg.norm(elsewhere))
        assert np.linalg.norm(left_DW) > 0.5 * np.linalg.norm(matrix_DHW[:, h])


@pytest.mark.parametrize("rank", [D, D - 3])
def test_what_writes_the_stream_takes_the_query_matrix_of_a_layer_without_skip(rank, rng):
    """x = u W: nothing else of the layer reads x, as keys and values are of the source. So W_Q need not be invertible."""
    p, (_, s_SW) = parameters(rng), streams(rng)
    u_LD, write_DD = rng.standard_normal((L, D)), rng.standard_normal((D, D))
    query_DD = p["query"]["kernel"].reshape(D, D)
    query_DD[:, rank:] = query_DD[:, : D - rank]
    actual = attend(without(p, "query"), u_LD @ (write_DD @ query_DD), s_SW, query="identity")
    assert relative_error(actual, attend(p, u_LD @ write_DD, s_SW)) < EXACT
    with_skip = u_LD @ write_DD + attend(p, u_LD @ write_DD, s_SW)
    assert relative_error(u_LD @ write_DD @ query_DD + actual, with_skip) > OTHER


def test_a_norm_lets_only_a_rotation_through(rng):
    """RMS norm without gains: norm(u W Q) = norm(u W) Q for an orthogonal Q, and for no other matrix."""
    x_LD = rng.standard_normal((L, D))
    norm = lambda x: x / np.sqrt(np.square(x).mean(-1, keepdims=True))  # noqa: E731
    query_DD = rng.standard_normal((D, D))
    rotation_DD = np.linalg.qr(query_DD)[0]
    assert relative_error(norm(x_LD @ rotation_DD), norm(x_LD) @ rotation_DD) < EXACT
    assert relative_error(norm(x_LD @ query_DD), norm(x_LD) @ query_DD) > OTHER


def test_the_end_of_the_encoder_takes_the_key_matrix_of_one_layer(rng):
    """s = t W without a norm, and H K = W: the keys of layer 1 are s itself; all else that reads s takes W_K^-1."""
    names = NAMES | {"query": (D, 2, W // 2), "key": (W, 2, W // 2), "value": (W, 2, W // 2), "output": (2, W // 2, D)}
    first, second = parameters(rng, names), parameters(rng, names)
    x_LD, t_SW = streams(rng)
    write_WW, key_WW = rng.standard_normal((W, W)), first["key"]["kernel"].reshape(W, W)
    back_WW, two = np.linalg.inv(key_WW), {"heads": 2, "size": W // 2}

    def rewritten(p, *names):
        return p | {name: {"kernel": np.tensordot(back_WW, p[name]["kernel"], 1)} for name in names}

    actual = attend(without(rewritten(first, "value"), "key"), x_LD, t_SW @ write_WW @ key_WW, key="identity", **two)
    assert relative_error(actual, attend(first, x_LD, t_SW @ write_WW, **two)) < INVERTED
    actual = attend(rewritten(second, "key", "value"), x_LD, t_SW @ write_WW @ key_WW, **two)
    assert relative_error(actual, attend(second, x_LD, t_SW @ write_WW, **two)) < INVERTED


@pytest.mark.parametrize("size, exact", [(W, True), (K, False)])
def test_keys_can_be_values_if_they_hold_what_the_values_read(size, exact, rng):
    """W_V W_O = W_K C has a solution C, the new W_O, for all W_V W_O only if W_K is invertible: one head of the width W."""
    names = {"query": (D, 1, size), "key": (W, 1, size), "value": (W, 1, size), "output": (1, size, D)}
    p, (x_LD, s_SW) = parameters(rng, names), streams(rng)

    def tied(p):
        read_WD = p["value"]["kernel"][:, 0] @ p["output"]["kernel"][0]
        new_KD = np.linalg.lstsq(p["key"]["kernel"][:, 0], read_WD, rcond=None)[0]
        return without(p, "value") | {"output": {"kernel": new_KD[None]}}

    one = {"heads": 1, "size": size}
    error = relative_error(attend(tied(p), x_LD, s_SW, value="key", **one), attend(p, x_LD, s_SW, **one))
    assert error < INVERTED if exact else error > OTHER
    within = p | {"value": {"kernel": p["key"]["kernel"] @ rng.standard_normal((size, size))}}
    error = relative_error(attend(tied(within), x_LD, s_SW, value="key", **one), attend(within, x_LD, s_SW, **one))
    assert error < INVERTED
