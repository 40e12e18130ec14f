"""test_processes.py runs this as several processes. Each prints its batches, host times and errors as JSON."""

import hashlib
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from xfresearch.options.run_options import MeshConfig
from xfresearch.run_config.config_files import parse
from xfresearch.runtime import command, distributed
from xfresearch.runtime.errors import Stopped, UserError

MESHES = ({"data": -1}, {"fsdp": 2, "tensor": 4}, {"data": 2, "context": 4}, {"tensor": 4, "context": 2})
STEPS = (0, 7)


def digest(batch: dict) -> str:
    return hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest()


def seen(config) -> dict:
    """For each mesh, the rows that this process reads, and digests of the global batches: of all their bytes in this
    process, and of the first one as a checkpoint has them."""
    from jax.experimental.multihost_utils import process_allgather

    from xfresearch.checkpoints.digests import digests
    from xfresearch.data.pipeline import Batches, evaluation_batches, prepare
    from xfresearch.sharding.mesh import make_mesh
    from xfresearch.sharding.partition import batch_sharding
    from xfresearch.sharding.placing import local_rows, place

    batches, heldout, collected = Batches(config), prepare(config, "validation"), {}
    shape = (config.batch_size, config.sequence_length)
    for sizes in MESHES:
        at = batch_sharding(make_mesh(replace(config, mesh=MeshConfig(**{"data": 1} | sizes))))
        rows = local_rows(at, shape)
        own = [batches.batch(step, rows) for step in STEPS]
        own += evaluation_batches(heldout, config.batch_size, 2 * config.batch_size - 3, rows)
        placed = [place(at, shape, rows, batch) for batch in own]
        whole = [digest(process_allgather(batch, tiled=True)) for batch in placed]
        read = [len(batch["tokens"]) for batch in own]
        collected[json.dumps(sizes)] = {"rows": rows.tolist(), "read": read, "digests": whole, "first": digests(placed[0])}
    return collected


def spread(config) -> dict:
    """Host times: each process takes a second per update longer than the one before it, and process 1 three more."""
    import jax

    from xfresearch.sharding.mesh import make_mesh
    from xfresearch.training.monitoring import HostTimes

    times, index = HostTimes(make_mesh(replace(config, mesh=MeshConfig()))), jax.process_index()
    times.count(dispatch_seconds=1.0, wait_seconds=float(index))
    times.count(dispatch_seconds=1.0 + 6 * (index == 1), wait_seconds=2.0 * index)
    return times.spread(times.gather())


def errors() -> list[str]:
    """The errors that this process gets when only process 0 fails."""

    def fail(error):
        raise error

    heard = []
    for error in (UserError("too wide: " + "é" * 3000), Stopped("disk full"), KeyError("lost")):
        try:
            distributed.run_on_first(lambda error=error: fail(error), "trying")
        except Exception as caught:
            heard.append(f"{type(caught).__name__}: {str(caught)[:60]}")
    return [*heard, str(distributed.run_on_first(lambda: "done", "working"))]


def mistaken(config) -> list[str]:
    """The errors here if the last process has other data directories, which is allowed, and then another mesh too; and
    if it has the same data, and other data."""
    import jax

    from xfresearch.checkpoints import manifest
    from xfresearch.training.workdir import require_same_config

    heard, last = [], jax.process_index() == jax.process_count() - 1
    own = replace(config, data=replace(config.data, cache_dir="elsewhere", workers=3))
    for other in (own, replace(own, mesh=MeshConfig(data=1, tensor=2), steps=99)):
        try:
            heard.append(str(require_same_config(other if last else config)))
        except UserError as error:
            heard.append(str(error))
    for digest in ("same", "other" if last else "same"):
        try:
            heard.append(str(manifest.require_same_everywhere({"train split of a": digest})))
        except UserError as error:
            heard.append(str(error))
    return heard


def shard(value: np.ndarray):
    """`value` sharded over the devices of all processes."""
    import jax

    at = jax.sharding.NamedSharding(jax.make_mesh((jax.device_count(),), ("fsdp",)), jax.sharding.PartitionSpec("fsdp"))
    return jax.make_array_from_callback(value.shape, at, lambda rows: value[rows])


def reach(config) -> int:
    """The trained reach if the widest span, 0.3, is in the last process."""
    from xfresearch.models.reach import trained_reach

    block = config.model.blocks["main"]
    attention = replace(block.attention, span="adaptive", span_ramp=4, window=400)
    model = replace(config.model, blocks={"main": replace(block, attention=attention)}, max_length=400)
    fractions = shard(np.linspace(0, 0.3, 64, dtype=np.float32))
    spans = {"blocks": {"main": {"attention": {"span": {"fraction": fractions}}}}}
    return dict(trained_reach(model, spans))["main"]


def damaged(place: Path) -> dict[str, str]:
    """The results of reading checkpoints whose copy in process 1 alone is damaged, and of an intact one after them."""
    import jax

    from xfresearch.checkpoints import store

    params = {"w": shard(np.arange(64, dtype=np.float32))}
    store.save_params(place / "whole", 3, params)
    distributed.wait_for_all("saved")
    heard = {}
    for what in ("params", "meta", "whole"):
        run = place / "whole"
        if jax.process_index() == 1 and what != "whole":
            run = shutil.copytree(run, place / what)
            for path in (run / "checkpoints" / "3" / what).rglob("*"):
                if path.is_file():
                    text = path.read_bytes()
                    path.write_bytes(
                        re.sub(rb'(params/w": ?")', rb"\g<1>1", text) if what == "meta" else text[: len(text) // 2]
                    )
        try:
            store.restore_params(run, 3, params)
            heard[what] = "read"
        except store.Corrupt as error:
            heard[what] = str(error)
    return heard


def not_good(place: Path) -> list:
    """The reason that a state is not saved if one value, in the last process, is NaN; the good steps after a rejection; and
    what is said of reading the rejected one."""
    from xfresearch.checkpoints import store
    from xfresearch.checkpoints.validity import NotGood
    from xfresearch.options.run_options import CheckpointConfig

    values = np.arange(64, dtype=np.float32)
    checkpoints = store.Checkpoints(place, CheckpointConfig())
    heard = []
    for step, last in enumerate((63, np.nan, 0), start=1):
        state = {"params": {"w": shard(np.append(values[:-1], np.float32(last)))}, "step": shard(values)}
        heard.append(checkpoints.save(step, state, {}))
    checkpoints.prove(1)
    checkpoints.reject_unproven("no update was finite")
    checkpoints.close()
    heard.append(store.agreed_steps(place))
    try:
        store.restore(place, 3, state)
    except NotGood as error:
        heard.append(str(error))
    return heard


def main(arguments: list[str]) -> None:
    parser = command.Parser()
    parser.add_argument("--config")
    distributed.add_flags(parser)
    options, overrides = parser.parse_known_args(arguments)
    config = parse(["--config", options.config, *overrides])
    with distributed.joined(options, config.data.cache_dir):
        result = {"seen": seen(config), "spread": spread(config), "errors": errors(), "mistaken": mistaken(config)}
        result["reach"] = reach(config)
        result["damaged"] = damaged(Path(config.data.cache_dir) / "copies")
        result["not good"] = not_good(Path(config.data.cache_dir) / "run")
        print(f"RESULT {json.dumps(result, default=np.ndarray.tolist)}", file=sys.stderr)


if __name__ == "__main__":
    command.run(main)
