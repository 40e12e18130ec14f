"""Run by test_scale.py: imports a folder, exports it again, and prints JSON of the memory that each took at most.

    python -m tests.interop.scale_worker --folder F [--out G]

Bytes: `peak` is how far the kernel's own high-water mark of resident memory (VmHWM, set back before) rose above what was
resident before; `anonymous` and `mapped` are the highest of the two kinds of pages that a thread saw, each against before.
"""

import json
import sys
import threading
import time
from pathlib import Path

from xfresearch import command, distributed

EVERY = 0.003  # seconds between two looks


def status() -> dict[str, int]:
    """Bytes of this process by kind: VmRSS, VmHWM, RssAnon, RssFile, RssShmem."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[0].startswith(("VmHWM", "VmRSS", "Rss"))}


class Watch:
    """The most memory that was in use within a `with`, above what was in use before it."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
        self.before, self.seen, self.done = status(), [], threading.Event()
        self.thread = threading.Thread(target=self._look)
        self.thread.start()
        self.begin = time.perf_counter()
        return self

    def _look(self):
        while not self.done.wait(EVERY):
            self.seen.append(status())

    def __exit__(self, *_):
        self.seconds = time.perf_counter() - self.begin
        self.seen.append(status())
        self.done.set()
        self.thread.join()

    def result(self) -> dict:
        def rise(names):
            return max(sum(seen[name] - self.before[name] for name in names) for seen in self.seen)

        peak = self.seen[-1]["VmHWM"] - self.before["VmRSS"]
        kinds = {"anonymous": rise(("RssAnon", "RssShmem")), "mapped": rise(("RssFile",))}
        return {"peak": peak, **kinds, "looks": len(self.seen), "seconds": self.seconds}


def main(arguments: list[str]) -> None:
    parser = command.Parser()
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--out", type=Path)
    distributed.add_flags(parser)
    options = parser.parse_args(arguments)
    with distributed.joined(options):
        print(f"RESULT {json.dumps(measure(options.folder, options.out))}", file=sys.stderr)


def measure(folder: Path, out: Path | None) -> dict:
    import jax
    import jax.numpy as jnp

    import xfresearch as xf
    from xfresearch.config.run import MeshConfig
    from xfresearch.interop import importing  # noqa: F401  what modules take is not the import's
    from xfresearch.interop.folder import stored_tensors
    from xfresearch.sharding.mesh import device_mesh, mesh_sizes

    devices, mesh = jax.devices(), None
    if len(devices) > 1:
        mesh = device_mesh(
            mesh_sizes(MeshConfig(data=1, fsdp=len(devices)), len(devices)), devices, MeshConfig().between
        )
    jnp.zeros(8).block_until_ready()
    largest = max(tensor.bytes for tensor in stored_tensors(folder).values())
    with Watch() as watch:
        lm = xf.load(folder, mesh=mesh)
        jax.block_until_ready(lm.params)
    leaves = jax.tree.leaves(lm.params)
    share = sum(
        size for leaf in leaves for size in {str(s.index): s.data.nbytes for s in leaf.addressable_shards}.values()
    )
    found = {"import": watch.result(), "largest": largest, "share": share, "devices": len(devices)}
    found["whole"] = sum(leaf.nbytes for leaf in leaves)
    if out:
        with Watch() as watch:
            lm.export_hf(out)
        found["export"] = watch.result()
    return found


if __name__ == "__main__":
    command.run(main)
