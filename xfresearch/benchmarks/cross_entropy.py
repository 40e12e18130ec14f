"""Cross-entropy of a linear head in tiles of tokens, compared with holding all logits at once (whole)."""

from argparse import ArgumentTypeError
from functools import partial

from xfresearch.benchmarks import side_by_side
from xfresearch.evaluation.held_out import at_least
from xfresearch.runtime.errors import UserError

SIZES = {"tokens": 4096, "width": 256, "vocab": 8192}


def add_flags(parser) -> None:
    side_by_side.add_flags(parser, SIZES)
    tiles = "the tile sizes to compare, in tokens"
    parser.add_argument("--rows", default="512,1024,4096", metavar="N,N,...", help=tiles)


def prepare(a, draw):
    import jax
    import jax.numpy as jnp

    from xfresearch.kernels.cross_entropy import linear_cross_entropy
    from xfresearch.kernels.head import Head

    labels_T = jnp.arange(a.tokens) % a.vocab
    weights_T = jnp.ones(a.tokens)

    def whole(x_TD, table_VD):
        wide = jnp.promote_types(x_TD.dtype, jnp.float32)
        logits_TV = jnp.einsum("TD,VD->TV", x_TD, table_VD, preferred_element_type=wide)
        return (jax.nn.logsumexp(logits_TV, -1) - jnp.take_along_axis(logits_TV, labels_T[:, None], 1)[:, 0]).sum()

    def tiled(rows):
        return lambda x_TD, table_VD: linear_cross_entropy(x_TD, Head(table_VD), labels_T, weights_T, rows=rows)[0]

    functions = {"whole": whole} | {f"rows={n}": tiled(n) for n in _tiles(a.rows)}
    return functions, (draw(a.tokens, a.width), draw(a.vocab, a.width)), 2 * a.tokens * a.width * a.vocab


def _tiles(words: str) -> list[int]:
    try:
        return [at_least(1)(word) for word in words.split(",")]
    except ArgumentTypeError:
        allowed = "positive integers separated by commas"
        raise UserError(f"--rows={words} is not allowed: it must be {allowed}") from None


run = partial(side_by_side.run, prepare=prepare)
