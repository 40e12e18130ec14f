"""Products of each expert's rows with its matrix, for groups of unequal size. `one matrix` is a single product with
the same rows."""

from functools import partial

from xfresearch.benchmarks import side_by_side

SIZES = {"tokens": 8192, "width": 256, "hidden": 512, "experts": 8}


def add_flags(parser) -> None:
    side_by_side.add_flags(parser, SIZES)


def prepare(a, draw):
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


run = partial(side_by_side.run, prepare=prepare)
