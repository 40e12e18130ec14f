"""The parameters of a layer that write the residual stream."""

from xfresearch.models.block_config import BlockConfig
from xfresearch.models.mixers.lambda_layer import LambdaConfig
from xfresearch.sharding.letters import Axes
from xfresearch.surgery.refused import refuse_unless


def last_maps(block: BlockConfig, axes: dict[str, Axes], sublayer: str, where: str) -> list[str]:
    """Paths of the last kernels of a sublayer and of their biases, whose sum is its output. The last dimension of each is
    D. Raises Refused if the output has other terms."""
    options = getattr(block, sublayer)
    output = "identity" if isinstance(options, LambdaConfig) else getattr(options, "output", "learned")
    refuse_unless(
        output == "learned",
        f"{where}: {sublayer} of kind {options.kind!r} with output='identity' writes its heads, and no matrix after them",
    )
    inside = {path: each for path, each in axes.items() if path.startswith(f"{sublayer}/")}
    return [path for path, each in inside.items() if each.outputs == "D" or _output_bias(path, each)]


def _output_bias(path: str, axes: Axes) -> bool:
    return axes.letters == "D" and path.endswith("/bias")
