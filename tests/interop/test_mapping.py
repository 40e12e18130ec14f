"""The parts of a Hugging Face tensor: of equal sizes, and of different sizes one after another."""

import numpy as np
import pytest

from xfresearch.interop.family import Part, row

D, H, G, K = 3, 4, 2, 5
SIZES = (("q", "H", H), ("k", "G", G), ("v", "G", G))
QUERY, KEY, VALUE = (Part(name, (), f"D{heads}K", (D, size, K)) for name, heads, size in SIZES)


@pytest.mark.parametrize("number, first, heads", [(0, 0, H), (1, H * K, G), (2, (H + G) * K, G)])
def test_parts_of_different_sizes_follow_one_another(number, first, heads):
    parts = (QUERY, KEY, VALUE)
    fused = row("qkv", "HK|GK|GK D", "q", "k", "v")
    tensor = np.arange((H + 2 * G) * K * D).reshape(fused.shape(parts))
    expected = tensor[first : first + heads * K].reshape(heads, K, D).transpose(2, 0, 1)
    result = fused.view(tensor, number, parts)
    assert np.array_equal(result, expected) and np.shares_memory(result, tensor)


def test_parts_of_equal_sizes_have_a_dimension_of_their_own():
    parts = tuple(Part(name, (), "DF", (D, K)) for name in ("gate", "up"))
    both = row("gate_up", "2F D", "gate", "up")
    tensor = np.arange(2 * K * D).reshape(both.shape(parts))
    assert np.array_equal(both.view(tensor, 1, parts), tensor[K:].T)
