"""test_emergency.py runs this as four processes, which lose the shards of some of them. Prints what each reads, as JSON."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np

from xfresearch.checkpoints import emergency, store
from xfresearch.options.run_options import CheckpointConfig
from xfresearch.runtime import command, distributed
from xfresearch.runtime.errors import UserError

MINUS = -0.0  # a sum of it and 0.0 is 0.0


def values(step: int) -> dict[str, np.ndarray]:
    """A state that has every dtype, and numbers that some ways to send them change."""
    random = np.random.default_rng(step)
    w = random.normal(size=(8, 4)).astype(np.float32)
    w[:, 0], w[:, 1] = MINUS, np.float32(1e-42)
    return {
        "w": w,
        "half": w.astype("bfloat16"),
        "count": np.array(step, np.int32),
        "on": w > 0,
        "seed": w.view(np.uint32),
    }


def placed(mesh, arrays: dict[str, np.ndarray]) -> dict:
    """The state with `w` and `half` sharded, and the others on all devices."""
    import jax

    def place(name, x):
        spec = jax.sharding.PartitionSpec("fsdp") if name in ("w", "half") else jax.sharding.PartitionSpec()
        return jax.make_array_from_callback(x.shape, jax.sharding.NamedSharding(mesh, spec), lambda index: x[index])

    state = {name: place(name, x) for name, x in arrays.items()}
    return {"params": {"w": state.pop("w")}, "ema": {"w": state.pop("half")}, **state}


def bits(shard) -> bytes:
    return np.asarray(shard.data).tobytes()


def same(mesh, state: dict, step: int) -> bool:
    """Whether the shards of this process have the bits of `values(step)`."""
    import jax

    expected = placed(mesh, values(step))
    pairs = zip(*map(jax.tree.leaves, (state, expected)), strict=True)
    shards = [(a.addressable_shards, b.addressable_shards) for a, b in pairs]
    return all(bits(x) == bits(y) for a, b in shards for x, y in zip(a, b, strict=True))


def read(made, mesh) -> list:
    """[steps that all have, processes that send the newest, whether its bits are those that were saved, or the error]."""
    import jax

    steps = made.steps()
    if not steps:
        return [steps]
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), placed(mesh, values(0))
    )
    try:
        state, meta = made.restore(steps[-1], target)
        return [steps, made.read_from(steps[-1]), same(mesh, state, meta["step"])]
    except store.Corrupt as error:
        return [steps, made.read_from(steps[-1]), str(error)]


def main(arguments: list[str]) -> None:
    parser = command.Parser()
    parser.add_argument("--memory")
    distributed.add_flags(parser)
    options = parser.parse_args(arguments)
    with distributed.joined(options, options.memory):
        import jax

        def new(begun: float = 1.0, machine: int | None = None):
            """The memory of this process, or of another machine."""
            of = jax.process_index() if machine is None else machine
            config = CheckpointConfig(emergency=f"{options.memory}/{of}", emergency_every=2)
            return emergency.of_run("/run", config, mesh, begun)

        def lose(*processes: int):
            distributed.wait_for_all("lose")
            if jax.process_index() in processes:
                shutil.rmtree(made.folder)

        mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        emergency.socket.gethostname = lambda: f"machine {jax.process_index()}"
        made, heard = new(), {}
        for step in (2, 4, 6):
            assert made.save(step, placed(mesh, values(step)), {"clock": jax.process_index()}) == ""
        made.wait()
        heard["all"] = read(made, mesh)
        try:
            emergency.of_run("/run", CheckpointConfig(emergency="/proc/x"), mesh, 1.0)
        except UserError as error:
            heard["refused"] = str(error)
        heard["another run"] = read(new(2.0), mesh)
        heard["slices change places"] = read(new(machine=(jax.process_index() + 2) % 4), mesh)
        made = new()
        lose(0, 3)
        heard["without 0 and 3"] = read(made, mesh)
        if jax.process_index() == 2:
            for path in (Path(made.folder) / "6" / "rest").rglob("*"):
                if path.is_file():
                    path.write_bytes(path.read_bytes()[:-9])
        heard["2 is damaged"] = read(made, mesh)
        lose(2)
        heard["without 0, 2 and 3"] = read(made, mesh)
        made.clear()
        heard["left"] = [str(path) for path in Path(options.memory, str(jax.process_index())).iterdir()]
        print(f"RESULT {json.dumps(heard)}", file=sys.stderr)


if __name__ == "__main__":
    command.run(main)
