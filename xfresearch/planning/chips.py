"""Specifications of accelerators: the numbers that a plan uses, each with its source.

All numbers are per JAX device. A v4, v5e, v5p or v6e chip is one device, and so is a GPU. A tpu7x chip is two devices
that share its links.
"""

from dataclasses import dataclass

from xfresearch.runtime.hardware import peak_flops

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """`memory` is the number of bytes that a program may use. Bandwidths are in bytes per second, in one direction.

    A TPU's `link` is one link of its torus, which has `dimensions` dimensions with two directions each. A GPU's one
    link leads to a switch that all GPUs of a host share. `network` leads out of the slice or host.
    """

    kind: str  # the beginning of JAX's device_kind
    memory: float
    memory_bandwidth: float
    link: float
    dimensions: int
    network: float
    devices: int = 1  # JAX devices per chip
    cores: int = 1  # TensorCores per chip; accelerator types of v4, v5p and tpu7x count these
    host: int = 4  # chips per host
    compute_capability: str = ""  # GPUs only: decides which kernels the GPU supports

    def peak(self, dtype: str) -> float:
        """Peak dense FLOP/s of one device for matrix products in bfloat16 or float32."""
        peak = peak_flops(self.kind, dtype)
        assert peak is not None, f"the table has no peak of {self.kind}"
        return peak

    @property
    def switched(self) -> bool:
        """Whether links go through a switch (GPUs) and do not form a torus (TPUs)."""
        return self.dimensions == 0


# TPU memory: the available memory that libtpu 0.0.52 reports when a program needs too much. TPU memory bandwidth and
# network bandwidth: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; the network's Gb/s are divided by 8. TPU
# links: "How To Scale Your Model", part 2, table of interconnects (one way, bytes per second and link). These are 10 %
# below Google's "bidirectional bandwidth per chip" divided by twice the number of links.
CHIPS = {
    "v4": Chip("TPU v4", 30.75 * GIB, 1.228e12, 4.5e10, 3, 6.25e9, cores=2),
    "v5e": Chip("TPU v5e", 15.75 * GIB, 8.19e11, 4.5e10, 2, 3.125e9),
    "v5p": Chip("TPU v5p", 95.73 * GIB, 2.765e12, 9e10, 3, 6.25e9, cores=2),
    "v6e": Chip("TPU v6e", 31.24 * GIB, 1.638e12, 9e10, 2, 1.25e10),
    "tpu7x": Chip("TPU7x", 94.74 * GIB, 3.69e12, 4.5e10, 3, 6.25e9, devices=2, cores=2),
}
# GPUs, memory and NVLink: NVIDIA's data sheets of the SXM modules ("A100 80GB", "H100", "H200") and of the DGX B200. The
# "total bandwidth" of NVLink counts both directions: 600 GB/s (A100), 900 (H100, H200), 1800 (B200). Network: one adapter
# per GPU, as in the data sheets of DGX A100 (200 Gb/s) and DGX H100, H200 and B200 (400 Gb/s). CUDA, NCCL and
# fragmentation get 6 % of the memory.
CHIPS |= {
    "a100": Chip("NVIDIA A100", 0.94 * 80e9, 2.039e12, 3e11, 0, 2.5e10, host=8, compute_capability="8.0"),
    "h100": Chip("NVIDIA H100", 0.94 * 80e9, 3.35e12, 4.5e11, 0, 5e10, host=8, compute_capability="9.0"),
    "h200": Chip("NVIDIA H200", 0.94 * 141e9, 4.8e12, 4.5e11, 0, 5e10, host=8, compute_capability="9.0"),
    "b200": Chip("NVIDIA B200", 0.94 * 180e9, 7.7e12, 9e11, 0, 5e10, host=8, compute_capability="10.0"),
}
