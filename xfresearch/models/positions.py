"""The kinds of positions: at the embedding, and inside attention, whose code is in mixers/softmax/."""

from typing import TYPE_CHECKING, Literal, NamedTuple

import jax.numpy as jnp


class Position(NamedTuple):
    formula: str
    paper: str = ""
    title: str = ""  # its name in text for people, after 'heads with'


AT_EMBEDDING = {
    "none": Position("no positions"),
    "learned": Position("x_n + p_n, a trained table p of max_length rows", "Gehring et al. 2017"),
    "sinusoidal": Position(
        "x_n + p_n, sines of n on even and cosines on odd dimensions, wavelengths 2 pi to 10000 * 2 pi",
        "Vaswani et al. 2017",
    ),
}
IN_ATTENTION = {
    "none": Position("no positions"),
    "rope": Position("queries and keys, in pairs of dimensions, rotated by n theta^(-2i/K)", "Su et al. 2021", "RoPE"),
    "alibi": Position("-2^(-8h/H) times the distance, added to the logits of head h", "Press et al. 2022", "ALiBi"),
    "t5": Position(
        "a trained number for each head and bucket of distances, added to the logits", "Raffel et al. 2020", "T5 biases"
    ),
    "relative_key": Position(
        "q . p_x, a trained key p_x for each distance x, added to the logits; all heads and layers share p",
        "Sukhbaatar et al. 2019",
        "relative keys",
    ),
}
if TYPE_CHECKING:  # a checker cannot read the values of a table
    EmbeddedPosition = str
    AttentionPosition = str
else:
    EmbeddedPosition, AttentionPosition = Literal[*AT_EMBEDDING], Literal[*IN_ATTENTION]


def sinusoidal(positions_BL, width: int):
    """p_n, float32 [B, L, width], or float64 if JAX runs with 64 bits (Vaswani et al. 2017, sec. 3.5)."""
    frequencies = 10_000.0 ** (-jnp.arange(0, width, 2) / width)
    angles = positions_BL[..., None] * frequencies
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(*positions_BL.shape, -1)[..., :width]
