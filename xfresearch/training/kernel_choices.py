"""The kernel of each sublayer of a run, chosen before anything is traced."""

from xfresearch.config.run import Config, TrainingConfig
from xfresearch.kernels.choice import Choice
from xfresearch.models.context import Execution
from xfresearch.models.kinds import kind_of


def execution(training: TrainingConfig) -> Execution:
    """How a run computes its model."""
    return Execution(training.attention_kernel, training.expert_kernel)


def kernel_choices(config: Config, mesh=None) -> dict[tuple[str, str], Choice]:
    """{(block, sublayer): the kernel for training and the reason}, for sublayers with more than one kernel.

    Raises UserError if the config selects a kernel that does not support its sublayer.
    """
    packed = config.data.packing == "documents"
    found = {}
    for name, sublayer, place in config.model.places():
        module = kind_of(place.options).module
        choice = module.kernel(place, config.sequence_length, packed, execution(config.training), mesh)
        if choice is not None:
            found[name, sublayer.name] = choice
    return found
