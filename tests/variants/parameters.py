"""Initial values, and parameters that several variants have."""

from tests import variants
from tests.variants.case import Parameter


def fan(n: int, model) -> float:
    """The standard deviation of a kernel with n inputs."""
    return model.init_std if model.init == "normal" else n**-0.5


def kernel_scale(model, block) -> float:
    return variants.LAYOUTS[block.layout].kernel_scale(model.depth)


def output_scale(model, block, sublayer: str) -> float:
    """Of the last kernel of a sublayer, or of the sublayers whose names begin so."""
    scaled = variants.LAYOUTS[block.layout].scaled
    if not any(name.startswith(sublayer) for name in scaled):
        return kernel_scale(model, block)
    return (model.depth * len(scaled)) ** -0.5


def inputs(shape, model, block) -> float:
    return fan(shape[0], model)


def values(shape, model, block) -> float:
    return kernel_scale(model, block) * fan(shape[0], model)


def outputs(shape, model, block) -> float:
    return output_scale(model, block, "attention") * fan(shape[0] * shape[1], model)


def biases(*paths: str) -> dict[str, Parameter]:
    return {f"{path}/bias": Parameter(0.0) for path in paths}


# The matrices of heads: W_Q and W_K, W_V, and W_O.
INPUT, VALUE, OUTPUT = Parameter(inputs, "bioo"), Parameter(values, "bioo"), Parameter(outputs, "biio")


def norm_gain(shape, model, block) -> float:
    return 1 - block.norm_offset


GAIN_AND_BIAS = {"gain": Parameter(norm_gain), "bias": Parameter(0.0)}  # of every norm


def key_slots(shape, model, block) -> float:
    """[M, G, K]: N(0, 1/K), as in the code of Sukhbaatar et al. 2019; [M, D]: like W_up."""
    return shape[2] ** -0.5 if len(shape) == 3 else kernel_scale(model, block) * fan(shape[1], model)


def value_slots(shape, model, block) -> float:
    """[M, G, K]: N(0, 1/M); [M, D]: like W_down."""
    return shape[0] ** -0.5 if len(shape) == 3 else output_scale(model, block, "attention") * fan(shape[0], model)


# Keys and values that a softmax reads are matrices, one for each head (Sukhbaatar et al. 2019, sec. 3); those of the model's
# width are like W_up transposed, and like W_down.
SLOTS = {
    "block/attention/memory/key": Parameter(key_slots, "bibo boi"),
    "block/attention/memory/value": Parameter(value_slots, "bibo bio"),
    "block/attention/memory/bias": Parameter(0.0),
}


def up(shape, model, block) -> float:
    return kernel_scale(model, block) * fan(shape[-2], model)


def down(shape, model, block) -> float:
    options = next(options for name, options in block.sublayers.items() if name.startswith("feed_forward"))
    activation = variants.ACTIVATIONS[options.moe.expert if options.kind == "moe" else options.kind]
    return output_scale(model, block, "feed_forward") * activation.down_scale(shape[-2]) * fan(shape[-2], model)


UP, DOWN = Parameter(up, "bio"), Parameter(down, "bio")
# What a mean of n values N(0, 1) with weights near 1/n has, for `writes`.
MEAN = "a mean of n values N(0, 1) with weights near 1/n has a std of sqrt(e / n), as attention over n tokens has"
