"""How a run computes its model: the kernel of each sublayer, layers, rows of the loss. Chosen before anything is traced."""

import typing
from dataclasses import replace

from xfresearch.kernels import attention, defaults, grouped_matmul
from xfresearch.kernels.choice import BY_NAME, KernelChoice
from xfresearch.models.context import Execution
from xfresearch.models.kinds import kind_of
from xfresearch.models.place import Rows
from xfresearch.models.stack import StackConfig
from xfresearch.models.taps import ENCODER
from xfresearch.options.run_options import TrainingConfig
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError

ROWS = (1024, 4096, 8192, 16_384, 32_768)  # values of training.loss_rows that a sweep measures


def execution(training: TrainingConfig) -> Execution:
    """How a run computes its sublayers."""
    return Execution(training.attention_kernel, training.expert_kernel)


def has_prefixes(config: Config) -> bool:
    """Whether rows have prefixes whose tokens see each other: those of a model with an encoder are sources."""
    return config.data.objective.kind == "prefix" and config.model.encoder is None


def kernel_choices(config: Config, mesh=None) -> dict[tuple[str, str], KernelChoice[str]]:
    """{(block, sublayer): the kernel for training and the reason}, for sublayers with more than one kernel. A block of an
    encoder is 'encoder.main'.

    Raises UserError if the config selects a kernel that does not support its sublayer.
    """
    encoder = config.model.encoder
    packed = config.data.packing == "documents" or encoder is not None
    prefixes = has_prefixes(config)
    stacks: list[tuple[str, StackConfig, int]] = [("", config.model, config.sequence_length)]
    stacks += [(f"{ENCODER}.", encoder, config.source_length)] if encoder else []
    chosen = {}
    for prefix, stack, length in stacks:
        for name, branch, place in stack.places():
            module = kind_of(place.options).module
            rows = Rows(segments=packed or prefixes, prefixes=prefixes)
            choice = module.kernel(place, length, rows, execution(config.training), mesh)
            if choice is not None:
                chosen[prefix + name, branch.name] = choice
    return chosen


def layers_choice(config: Config, mesh=None) -> KernelChoice[str]:
    """'scan' or 'unroll', and the reason."""
    training = config.training
    if training.layers != "auto":
        return KernelChoice(training.layers, BY_NAME)
    return defaults.fast_layers(config.model.depth, mesh, training.expert_kernel)


def loss_rows_choice(config: Config, mesh=None) -> KernelChoice[int]:
    """The number of tokens whose logits a device computes at a time, and the reason."""
    if config.training.loss_rows:
        return KernelChoice(config.training.loss_rows, BY_NAME)
    return defaults.loss_rows(_vocabulary(config, mesh), mesh)


def padded_vocabulary(config: Config, mesh=None) -> KernelChoice[int]:
    """The number of ids in a device's products with the vocabulary, and the reason."""
    multiple, reason = defaults.vocabulary_multiple(mesh)
    return KernelChoice(-(-_vocabulary(config, mesh) // multiple) * multiple, reason)


def _vocabulary(config: Config, mesh) -> int:
    return config.model.vocab_size // (1 if mesh is None else mesh.shape["tensor"])


def choices(config: Config, mesh=None) -> dict[str, tuple]:
    """{key: the values that it may have on these devices} of the options of execution, to measure which is the fastest.
    Options of which only one value is possible are left out."""
    tokens = config.batch_size * config.sequence_length
    several = {
        "training.layers": ("scan", "unroll"),
        "training.loss_rows": tuple(rows for rows in ROWS if rows < 2 * tokens),
        "training.attention_kernel": _supported(config, mesh, "attention_kernel", attention.REFUSALS),
        "training.expert_kernel": _supported(config, mesh, "expert_kernel", grouped_matmul.REFUSALS),
        "training.remat": typing.get_args(typing.get_type_hints(TrainingConfig)["remat"]),
    }
    return {key: values for key, values in several.items() if len(values) > 1}


def _supported(config: Config, mesh, option: str, names) -> tuple[str, ...]:
    """The names that no sublayer of the config refuses; () if all of them lead to the same kernels."""
    by_option = {}
    for name in names:
        try:
            by_option[name] = kernel_choices(replace(config, training=replace(config.training, **{option: name})), mesh)
        except UserError:
            continue
    return tuple(by_option) if len({tuple(each.values()) for each in by_option.values()}) > 1 else ()
