"""Causal self-attention with persistent memory slots."""

from functools import partial

from xfresearch.benchmarks import side_by_side

SIZES = {"batch": 16, "length": 256, "heads": 4, "kv-heads": 4, "head-size": 64, "memory": 0}


def add_flags(parser) -> None:
    side_by_side.add_flags(parser, SIZES)


def prepare(a, draw):
    from xfresearch.kernels.attention import REFUSALS, attention, choose_attention, describe
    from xfresearch.runtime.errors import UserError

    G = a.kv_heads
    K = a.head_size
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
    return (
        {name: implementation(name) for name, refuse in REFUSALS.items() if not refuse(call)},
        (q, k, v, memory),
        flops,
    )


run = partial(side_by_side.run, prepare=prepare)
