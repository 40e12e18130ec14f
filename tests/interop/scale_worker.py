"""Imports a folder, exports it again, and prints the peak memory of both as JSON. Run by test_scale.py.

    python -m tests.interop.scale_worker --folder F [--out G]

Values are bytes above the start. `peak` is the rise of the kernel's high-water mark of resident memory (VmHWM, reset at
the start); `anonymous` and `mapped` are the highest values of these two kinds of pages that a sampling thread saw.
"""

import json
import sys
import threading
import time
from pathlib import Path

from xfresearch.runtime import command, distributed

EVERY = 0.003  # seconds between samples


def status() -> dict[str, int]:
    """Memory of this process in bytes: VmRSS, VmHWM, RssAnon, RssFile, RssShmem."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[0].startswith(("VmHWM", "VmRSS", "Rss"))}


class Watch:
    """Measures the peak memory within a `with` block, above the memory in use before it."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
        self.before = status()
        self.samples = []
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._sample)
        self.thread.start()
        self.begin = time.perf_counter()
        return self

    def _sample(self):
        while not self.done.wait(EVERY):
            self.samples.append(status())

    def __exit__(self, *_):
        self.seconds = time.perf_counter() - self.begin
        self.samples.append(status())
        self.done.set()
        self.thread.join()

    def result(self) -> dict:
        def rise(names):
            return max(sum(sample[name] - self.before[name] for name in names) for sample in self.samples)

        peak = self.samples[-1]["VmHWM"] - self.before["VmRSS"]
        kinds = {"anonymous": rise(("RssAnon", "RssShmem")), "mapped": rise(("RssFile",))}
        return {"peak": peak, **kinds, "looks": len(self.samples), "seconds": self.seconds}


def main(arguments: list[str]) -> None:
    parser = command.Parser()
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--out", type=Path)
    distributed.add_flags(parser)
    options = parser.parse_args(arguments)
    with distributed.joined(options, str(options.folder)):
        print(f"RESULT {json.dumps(measure(options.folder, options.out))}", file=sys.stderr)


def measure(folder: Path, out: Path | None) -> dict:
    import jax
    import jax.numpy as jnp

    import xfresearch as xf
    from xfresearch.interop import importing  # noqa: F401  loaded now, so that modules are not counted
    from xfresearch.interop.folder import stored_tensors
    from xfresearch.options.run_options import MeshConfig
    from xfresearch.sharding.mesh import device_mesh, mesh_sizes

    devices = jax.devices()
    mesh = None
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
    seconds = {"import": watch.result(), "largest": largest, "share": share, "devices": len(devices)}
    seconds["whole"] = sum(leaf.nbytes for leaf in leaves)
    if out:
        with Watch() as watch:
            lm.export_hf(out)
        seconds["export"] = watch.result()
    return seconds


if __name__ == "__main__":
    command.run(main)
