"""What one accelerator can do: the numbers that a plan reckons with, each with its source.

All of them are per JAX device: a v4, v5e, v5p or v6e chip and a GPU is one device, a tpu7x chip is two that share its links.
"""

from dataclasses import dataclass

from xfresearch.hardware import peak_flops

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """`memory` is what a program may use, in bytes; bandwidths are bytes per second, links one way.

    A TPU's `links` are those of its torus, `dimensions` of them, each with two directions; a GPU's one link leads to a
    switch that all GPUs of a host share. `network` leads out of the slice or host.
    """

    kind: str  # how JAX's device_kind of it begins
    memory: float
    memory_bandwidth: float
    link: float
    dimensions: int
    network: float
    devices: int = 1  # JAX devices per chip
    cores: int = 1  # TensorCores per chip, which v4, v5p and tpu7x accelerator types count
    host: int = 4  # chips per host
    compute_capability: str = ""  # of a GPU: which kernels it has

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s of one device in matrix products of bfloat16 or float32."""
        return peak_flops(self.kind, dtype)

    @property
    def switched(self) -> bool:
        return self.dimensions == 0


# Memory of a TPU: what libtpu 0.0.52 says is available where a program asks for too much.
# Memory and network bandwidth: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, the network's Gb/s over 8.
# Links: "How To Scale Your Model", part 2, table of interconnects (one way, bytes per second and link), which lies 10 %
# below Google's "bidirectional bandwidth per chip" over twice the number of links.
CHIPS = {
    "v4": Chip("TPU v4", 30.75 * GIB, 1.228e12, 4.5e10, 3, 6.25e9, cores=2),
    "v5e": Chip("TPU v5e", 15.75 * GIB, 8.19e11, 4.5e10, 2, 3.125e9),
    "v5p": Chip("TPU v5p", 95.73 * GIB, 2.765e12, 9e10, 3, 6.25e9, cores=2),
    "v6e": Chip("TPU v6e", 31.24 * GIB, 1.638e12, 9e10, 2, 1.25e10),
    "tpu7x": Chip("TPU7x", 94.74 * GIB, 3.69e12, 4.5e10, 3, 6.25e9, devices=2, cores=2),
}
# GPU: NVIDIA's data sheets; NVLink's "total bandwidth" is of both directions. The network is one 400 Gb/s adapter per GPU
# (200 Gb/s with the A100), as in DGX systems. 6 % of memory is left to CUDA, NCCL and fragmentation.
CHIPS |= {
    "a100": Chip("NVIDIA A100", 0.94 * 80e9, 2.039e12, 3e11, 0, 2.5e10, host=8, compute_capability="8.0"),
    "h100": Chip("NVIDIA H100", 0.94 * 80e9, 3.35e12, 4.5e11, 0, 5e10, host=8, compute_capability="9.0"),
    "h200": Chip("NVIDIA H200", 0.94 * 141e9, 4.8e12, 4.5e11, 0, 5e10, host=8, compute_capability="9.0"),
    "b200": Chip("NVIDIA B200", 0.94 * 180e9, 7.7e12, 9e11, 0, 5e10, host=8, compute_capability="10.0"),
}
