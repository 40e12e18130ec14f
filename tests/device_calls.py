"""Records what Python asks of JAX's devices: transfers in both directions and executed programs, with thread and order."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax
import pytest
from jax._src import array, dispatch, pjit
from jax._src.interpreters import pxla


class Call(NamedTuple):
    kind: str  # put: to a device; run: a program; copy: to the host, begun; read: by the host; wait: for arrays
    name: str  # of the program
    thread: str


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """The calls of all threads while the `with` block runs, in order. Without JAX's fast paths, which no test can see, every
    execution of every program counts, of those that are compiled inside the block."""
    calls: list[Call] = []

    def note(kind: str, name: str = "") -> None:
        calls.append(Call(kind, name, threading.current_thread().name))

    def noted(function, kind: str):
        def call(*arguments, **options):
            note(kind)
            return function(*arguments, **options)

        return call

    def execute(program, *arguments):
        note("run", program.name)
        return run(program, *arguments)

    run, value = pxla.ExecuteReplicated.__call__, array.ArrayImpl._value.fget
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pjit, "_get_fastpath_data", lambda *_: None)
        patch.setattr(pxla.MeshExecutable, "create_cpp_call", lambda *_: None)
        patch.setattr(pxla.ExecuteReplicated, "__call__", execute)
        patch.setattr(pxla, "batched_device_put", noted(pxla.batched_device_put, "put"))
        patch.setattr(dispatch, "_batched_device_put_impl", noted(dispatch._batched_device_put_impl, "put"))
        patch.setattr(array.ArrayImpl, "_value", property(noted(value, "read")))
        patch.setattr(array.ArrayImpl, "copy_to_host_async", noted(array.ArrayImpl.copy_to_host_async, "copy"))
        patch.setattr(jax, "block_until_ready", noted(jax.block_until_ready, "wait"))
        yield calls
