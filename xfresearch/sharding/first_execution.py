"""One thread owns the devices of a process, and no transfer runs while a program is executed for the first time.

At the first execution of a program with cuDNN in it, XLA loads the cuDNN graphs, and cuDNN records ("captures") for a moment
all work on the stream of the computations. A transfer that begins or ends in that moment is recorded too, and breaks the
recording: "cuda_graph_end_capture ... failed with capturing stream has unjoined work". So

- the thread that executes programs also puts arrays on devices and copies them to the host. Other threads, which read
  batches or write checkpoints, use NumPy arrays;
- a program that runs beside transfers is wrapped in `alone_at_first`.
"""

from collections.abc import Callable

import jax


def alone_at_first(program: Callable) -> Callable:
    """`program`, a compiled one or a jitted one that gets arguments of one shape. Its first call waits until all arrays are
    on the devices and until its own results are there. Copies to the host that have begun must have ended. Later calls
    return at once, as those of `program` do."""
    executed = False

    def execute(*arguments):
        nonlocal executed
        if executed:
            return program(*arguments)
        jax.block_until_ready(jax.live_arrays())
        results = jax.block_until_ready(program(*arguments))
        executed = True
        return results

    return execute
