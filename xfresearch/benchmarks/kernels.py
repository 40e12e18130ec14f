"""Functions of arrays whose implementations are compared side by side (side_by_side.py). A function's docstring is its help.

It gets the options and draw(*shape), which returns random numbers, and returns {implementation: function}, the arguments of
all of them, and the FLOPs of a forward pass.
"""

from argparse import ArgumentTypeError

from xfresearch.benchmarks.side_by_side import SideBySide
from xfresearch.evaluation.held_out import at_least
from xfresearch.runtime.errors import UserError


def attention(a, draw):
    """Causal self-attention with persistent memory slots."""
    from xfresearch.kernels.attention import REFUSALS, attention, choose_attention, describe

    G, K = a.kv_heads, a.head_size
    if a.heads % G:
        raise UserError(f"--kv-heads={G} is not allowed: it must be a divisor of --heads={a.heads}")
    q, k, v = (draw(a.batch, a.length, heads, K) for heads in (a.heads, G, G))
    memory = (draw(a.memory, G, K), draw(a.memory, G, K)) if a.memory else None

    def implementation(name):
        return lambda q, k, v, memory: attention(q, k, v, memory=memory, implementation=name)

    call = describe(q, k, v, memory)
    print("auto: " + ", ".join(choose_attention(call)))
    # The causal mask hides half of the context. Each pair of positions has two products.
    flops = 4 * a.batch * a.length * a.heads * K * (a.length / 2 + a.memory)
    supporting = {name: implementation(name) for name, refuse in REFUSALS.items() if not refuse(call)}
    return supporting, (q, k, v, memory), flops


def cross_entropy(a, draw):
    """Cross-entropy of a linear head in tiles of tokens, compared with holding all logits at once (whole)."""
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


def _add_rows(parser) -> None:
    tiles = "the tile sizes to compare, in tokens"
    parser.add_argument("--rows", default="512,1024,4096", metavar="N,N,...", help=tiles)


def _tiles(words: str) -> list[int]:
    try:
        return [at_least(1)(word) for word in words.split(",")]
    except ArgumentTypeError:
        allowed = "positive integers separated by commas"
        raise UserError(f"--rows={words} is not allowed: it must be {allowed}") from None


def grouped_matmul(a, draw):
    """Products of each expert's rows with its matrix, for groups of unequal size. `one matrix` is a single product with
    the same rows."""
    import jax.numpy as jnp
    import numpy as np

    from xfresearch.kernels.grouped_matmul import REFUSALS, Call, choose_grouped_matmul, grouped_matmul
    from xfresearch.sharding.devices import platform

    rng = np.random.default_rng(0)
    sizes_E = jnp.asarray(rng.multinomial(a.tokens, rng.dirichlet(np.full(a.experts, 5.0))), jnp.int32)

    def implementation(name):
        return lambda x_TD, w_EDF: grouped_matmul(x_TD, w_EDF, sizes_E, implementation=name)

    call = Call(platform(), a.dtype)
    print("auto: " + ", ".join(choose_grouped_matmul(call)))
    functions = {name: implementation(name) for name, refusal in REFUSALS.items() if not refusal(call)}
    functions["one matrix"] = lambda x_TD, w_EDF: x_TD @ w_EDF[0]
    return functions, (draw(a.tokens, a.width), draw(a.experts, a.width, a.hidden)), 2 * a.tokens * a.width * a.hidden


SIZES = {"batch": 16, "length": 256, "heads": 4, "kv-heads": 4, "head-size": 64, "memory": 0}
KERNELS = {
    "attention": SideBySide(attention, SIZES),
    "cross_entropy": SideBySide(cross_entropy, {"tokens": 4096, "width": 256, "vocab": 8192}, _add_rows),
    "grouped_matmul": SideBySide(grouped_matmul, {"tokens": 8192, "width": 256, "hidden": 512, "experts": 8}),
}
