"""What `auto` chooses on each device, and the measurement that it rests on.

The choice is the first line of a table that applies and whose kernel supports the call. Whether a kernel supports a call is
not decided here but beside the kernels (`REFUSALS` in attention.py and grouped_matmul.py). docs/sharding.md shows these
tables (python -m docs.write).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from xfresearch.kernels.choice import KernelChoice
from xfresearch.sharding.devices import memory, platform

NOT_MEASURED = "not measured"
H200 = "one H200, jax 0.11.2, f688592, 2026-11-27"
XEON = "2 cores of a Xeon with AMX, jax 0.12.0.1, 2026-11-20"
EPYC = "2 cores of an AMD EPYC with avx512_bf16, jax 0.12.0.1, f688592, 2026-11-27"
LENGTHS = "2 cores of an AMD EPYC, jax 0.10.2, da04376c, 2026-11-28, gpt2.py:3m with 2,048 tokens per update"
SWEPT = "2 cores of an AMD EPYC, jax 0.10.2, 36418a1, 2026-11-28, moe.py:3m with 128 tokens"
TOKAMAX = "tokamax is chosen only by name until a test on a GPU has compared it with float32"

PLAIN = 128  # tokens: up to this length, a CPU computes all weights of attention at once
UNROLLED = 32  # layers: the most that are compiled one by one on a GPU
MULTIPLE = 128  # ids: a GPU's matrix products are slow if the vocabulary is not a multiple of this
LEAST_ROWS, MOST_ROWS = 1024, 32_768
SHARE_OF_LOGITS = 64  # the logits that the loss holds at once, in float32, take at most 1/64 of a GPU's memory


class Default(NamedTuple):
    """A line of a table."""

    choice: Any  # a name or a number, or a function of a Setting that returns one
    where: str  # the devices and models that it is for, in words
    applies: Callable  # of a Setting or a kernel's Call
    reason: str
    measured: str = NOT_MEASURED


class Own(NamedTuple):
    """A kernel of ours."""

    chosen: str  # the setting that selects it
    libraries: str  # what libraries offer instead
    reason: str  # why the kernel stays


class Setting(NamedTuple):
    """What the choices that are not of a kernel depend on."""

    platform: str  # cpu, gpu or tpu
    memory: int = 0  # bytes of the device; 0 if it is not known
    depth: int = 1  # number of layers
    expert_kernel: str = "auto"  # training.expert_kernel
    vocabulary: int = 1  # ids whose logits a device computes


def _cpu(call) -> bool:
    return call.platform == "cpu"


def _gpu(call) -> bool:
    return call.platform == "gpu"


def _tpu(call) -> bool:
    return call.platform == "tpu"


def _anywhere(call) -> bool:
    return True


def rows_in_memory(setting: Setting) -> int:
    """The number of tokens, a power of two, whose logits fit into their share of the device's memory."""
    fit = setting.memory // (SHARE_OF_LOGITS * 4 * setting.vocabulary)
    return min(max(LEAST_ROWS, 1 << max(fit, 1).bit_length() - 1), MOST_ROWS) if setting.memory else 4 * LEAST_ROWS


LAYERS = (
    Default(
        "unroll",
        "CPU",
        _cpu,
        "a scan copies each layer's parameters",
        f"{XEON}: 12 layers of width 256 take 0.89 s, scanned 1.07 s; they compile in 1.5 to 2.2 s, scanned in 1.2 s",
    ),
    Default(
        "scan",
        "GPU, experts with tokamax",
        lambda setting: _gpu(setting) and setting.expert_kernel == "tokamax",
        "unrolled layers take too long to compile",
        f"{H200}: 16 unrolled layers of experts did not finish compiling in 120 s",
    ),
    Default(
        "unroll",
        f"GPU, up to {UNROLLED} layers",
        lambda setting: _gpu(setting) and setting.depth <= UNROLLED,
        "a scan copies each layer's parameters and activations",
        f"{H200}: GPT-2 124M with loss_rows=32768 at 474,214 tokens/s, scanned at 349,091",
    ),
    Default(
        "scan",
        "TPU, and GPU with more layers",
        _anywhere,
        "compiles in the same time for any number of layers",
        "compiled for a v5e, not run: 12 layers in 15 s, unrolled in 39 s",
    ),
)
LOSS_ROWS = (
    Default(
        rows_in_memory,
        f"GPU: a power of two from {LEAST_ROWS:,} to {MOST_ROWS:,}, by memory",
        _gpu,
        f"logits in float32 take at most 1/{SHARE_OF_LOGITS} of the memory",
        f"{H200}: GPT-2 124M, scanned, with 1,024 / 8,192 / 32,768 rows at 333,591 / 340,929 / 349,091 tokens/s. At c11bd86 "
        "with 16,384 rows, unrolled, its update held 19.2 GB, where PyTorch's held 16.3: so half as many are the default",
    ),
    Default(LEAST_ROWS, "CPU and TPU", _anywhere, "small enough for any device"),
)
VOCABULARY = (
    Default(
        MULTIPLE,
        "GPU",
        _gpu,
        "the head's products take longer with other numbers of ids",
        f"{H200}: GPT-2 124M with 50,304 ids at 333,591 tokens/s, with 50,257 at 293,963. The padding itself was not "
        "measured",
    ),
    Default(1, "CPU and TPU", _anywhere, "not padded"),
)
ATTENTION = (
    Default("banded", "CPU, windows", _cpu, "computes only the window"),
    Default(
        "plain",
        f"CPU, up to {PLAIN} tokens without slots",
        lambda call: _cpu(call) and call.length <= PLAIN and not call.memory,
        "skipping masked keys saves less than it costs",
        f"{LENGTHS}: 1.13 and 1.04 times as fast as blocked with 64 and 128 tokens, and compiled in half the time. In the "
        "sweeps with 128 tokens: 1.15 (gpt2.py:3m) and 1.07 (moe.py:3m)",
    ),
    Default(
        "blocked",
        "CPU",
        _cpu,
        "skips masked keys and saves its weights; fast on CPU",
        f"{LENGTHS}: plain has 0.94, 0.86 and 0.78 of its speed with 256, 512 and 1,024 tokens",
    ),
    Default(
        "banded",
        "GPU, biases and a window of at most an eighth of the sequence",
        lambda call: _gpu(call) and bool(call.altered) and 0 < 8 * call.mask.window <= call.length,
        "computes only the window",
    ),
    Default(
        "cudnn",
        "GPU, without biases, packed documents and sinks",
        lambda call: _gpu(call) and not (call.altered or call.segments or call.sink),
        "skips masked blocks, holds no matrix of weights",
        f"{H200}, causal, B32 L1024 H12 K64, forward and backward: 0.82 ms; tokamax 0.88 (Mosaic) and 1.11 (Triton), "
        "chunked 5.83. B8 L2048 H16 K128: 1.26, 1.30, 2.14 and 8.62 ms. With a bias [1, H, L, L]: 1.72 ms, tokamax 1.49 and "
        "2.28, plain 6.72; and 2.50, 2.25, 3.63 and 8.35 ms. By name only with biases, documents and sinks: on one H100 "
        "(88e9da7) 8 of 15 tests with a bias failed, and those of documents and sinks did not run. Not measured: Ampere and "
        "Blackwell (there tokamax may be faster)",
    ),
    Default("banded", "GPU, windows", _gpu, "computes only the window"),
    Default(
        "chunked",
        "GPU",
        _gpu,
        "holds no matrix of weights",
        f"{H200}: 5 to 7 times as long as cudnn in bfloat16; cuDNN has no kernel for float32",
    ),
    Default("splash", "TPU", _tpu, "skips masked blocks, holds no matrix of weights"),
    Default("banded", "TPU, windows", _tpu, "computes only the window"),
)
EXPERTS = (
    Default(
        "blocked",
        "CPU",
        _cpu,
        "computes only chosen experts, in blocks; ragged_dot computes all of them",
        f"{SWEPT}: ragged has 0.55 of its speed and needs 0.29 GB instead of 0.16",
    ),
    Default(
        "ragged",
        "GPU",
        _gpu,
        "XLA's grouped product",
        f"{H200}, 65,536 rows, 1024 x 1024, 8 experts, forward and backward: 6.29 ms; blocked 15.64, tokamax 1.69. A model "
        f"of 510M parameters at 86,803 tokens/s, with blocked at 42,511. {TOKAMAX}: its gradient of the weights differed "
        "by 1.5e-2 in bfloat16",
    ),
    Default(
        "megablox",
        "TPU",
        _tpu,
        "computes only chosen experts; ragged_dot computes all of them with some versions of libtpu",
    ),
    Default("ragged", "TPU", _tpu, "supports every dtype"),
)
# Settings that only the user chooses, because they have a price.
BY_HAND = (
    Default(
        "training.remat=dots",
        "memory for time",
        _anywhere,
        "recomputes all but products without batch dimensions",
        f"{SWEPT}: 0.84 of the speed; 0.16 GB with and without, as layers are unrolled",
    ),
    Default(
        "training.remat=full",
        "memory for time",
        _anywhere,
        "recomputes each layer. How much it saves depends on the layers, scanned or not: `plan` estimates it",
        f"{SWEPT}: 0.83 of the speed; 0.16 GB with and without, as layers are unrolled",
    ),
    Default(
        "XLA_FLAGS=--xla_cpu_experimental_onednn_custom_call=true",
        "CPU, jax 0.12",
        _cpu,
        "oneDNN's matrix products. Programs with them cannot be written to the compilation cache (a warning says so), so "
        "every start compiles again; jax 0.10 gains nothing",
        f"{EPYC}: gpt2.py:5m, 16 x 256 tokens, 256 ids: float32 at 6,185 tokens/s instead of 5,920, bfloat16 at 8,027 "
        "instead of 6,405",
    ),
)
NO_LIBRARY = "none"
OWN = {
    "attention: plain": Own(
        "`auto` on a CPU with short sequences, and where no line supports the call",
        "`jax.nn.dot_product_attention`, which is the same on a CPU",
        "the reference of all tests; slots and sinks in the softmax, shaping, dropout, taps",
    ),
    "attention: blocked": Own(
        "`auto` on a CPU", NO_LIBRARY, "skips masked keys, and its backward pass reads saved weights"
    ),
    "attention: banded": Own(
        "`auto` with windows",
        "windows of cuDNN, splash and tokamax",
        "they have none in float32 on a GPU, and none with dropout, shaping, or both a bias and slots",
    ),
    "attention: chunked": Own(
        "`auto` on a GPU in float32 and float64, with softcaps and for lengths that cuDNN refuses; `ring`",
        "tokamax in float32",
        "tokamax has no slots and sinks, and its tests have not run on a GPU",
    ),
    "attention: ring": Own("its name, with `mesh.context`", NO_LIBRARY, "the only one that does not gather the keys"),
    "attention: merged": Own(
        "slots and sinks in `cudnn`, `splash`, `chunked` and `ring`",
        NO_LIBRARY,
        "libraries return the logarithm of a part's sum without a gradient",
    ),
    "attention to slots alone": Own("the mixer `slots`", NO_LIBRARY, "holds no matrix of all weights"),
    "experts: blocked": Own(
        "`auto` on a CPU; its name elsewhere",
        "`jax.lax.ragged_dot`",
        "`ragged_dot` multiplies every row by every expert on a CPU. On a GPU it was faster with 8; more were not measured",
    ),
    "cross-entropy": Own("always", "optax", "optax needs the logits of all tokens at once; shards of the vocabulary"),
    "lambda layers": Own("the mixer `lambda`", NO_LIBRARY, "linear in the length, exact for any growth of keys"),
    "top-p": Own("sampling", "`jax.lax.sort`", "5 ms instead of 190 for 16 rows of 50,257 on two cores of a CPU"),
}
BY_NAME = {  # kernels that no line of a table chooses, and why they stay
    "ring": "the other kernels gather keys and values, which takes less time where they fit",
    "tokamax": TOKAMAX,
}
TABLES = {
    "training.layers": LAYERS,
    "training.loss_rows": LOSS_ROWS,
    "vocabulary padded to a multiple of": VOCABULARY,
    "training.attention_kernel": ATTENTION,
    "training.expert_kernel": EXPERTS,
    "by hand only": BY_HAND,
}


def preferred(table: tuple[Default, ...], call) -> dict[str, str]:
    """{kernel: reason} of the lines that apply to a kernel's Call, in their order."""
    return {line.choice: line.reason for line in table if line.applies(call)}


def choose_default(table: tuple[Default, ...], setting: Setting) -> KernelChoice:
    """The first line that applies."""
    line = next(line for line in table if line.applies(setting))
    return KernelChoice(line.choice(setting) if callable(line.choice) else line.choice, line.reason)


def fast_layers(depth: int, mesh=None, expert_kernel: str = "auto") -> KernelChoice[str]:
    """'scan' or 'unroll', for that many layers on the mesh's devices (without a mesh, JAX's default device)."""
    return choose_default(LAYERS, Setting(platform(mesh), depth=depth, expert_kernel=expert_kernel))


def loss_rows(vocabulary: int, mesh=None) -> KernelChoice[int]:
    """The number of tokens whose logits for `vocabulary` ids a device of the mesh holds at a time."""
    return choose_default(LOSS_ROWS, Setting(platform(mesh), memory(mesh), vocabulary=vocabulary))


def vocabulary_multiple(mesh=None) -> KernelChoice[int]:
    """The number to whose multiple the vocabulary of matrix products is padded; 1 for no padding."""
    return choose_default(VOCABULARY, Setting(platform(mesh)))
