"""The sharding table: every parameter has one rule, and a sharding that is not possible is refused by name."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from tests.blocks import block
from tests.contracts.variants import ALL
from xfresearch.models import transformer
from xfresearch.models.model_config import ModelConfig, resolve_model
from xfresearch.options.run_options import MeshConfig
from xfresearch.runtime.errors import UserError
from xfresearch.sharding import letters
from xfresearch.sharding.mesh import AXES, check_batch, device_mesh, mesh_sizes
from xfresearch.sharding.partition import param_shardings


def abstract_mesh(**sizes):
    sizes = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1, "context": 1} | sizes
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 5)


NARROW = block(attention={"heads": 3}, feed_forward={"hidden": 31})


def moe_params():
    moe = block(feed_forward={"kind": "moe", "hidden": 64})
    return of(ModelConfig(width=32, depth=2, vocab_size=48, max_length=8, blocks={"main": moe}))


def of(model):
    """The abstract parameters of a model, and their Axes."""
    model = resolve_model(model)
    return transformer.abstract(model), transformer.axes(model)


def test_parameters_are_sharded_by_the_table():
    specs = param_shardings(abstract_mesh(fsdp=2, tensor=4, expert=8), *moe_params())
    main = specs["blocks"]["main"]
    assert main["attention"]["query"]["kernel"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert main["feed_forward"]["experts"]["up"].spec == PartitionSpec(None, "expert", "fsdp", "tensor")
    assert specs["embed"]["table"].spec == PartitionSpec("tensor", "fsdp")


def test_a_single_key_value_head_is_replicated():
    blocks = {"main": block(attention={"heads": 4, "kv_heads": 1})}
    params = of(ModelConfig(width=32, depth=2, vocab_size=48, max_length=8, blocks=blocks))
    specs = param_shardings(abstract_mesh(tensor=4), *params)["blocks"]["main"]["attention"]
    assert specs["query"]["kernel"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert specs["key"]["kernel"].spec == specs["value"]["kernel"].spec == PartitionSpec(None, "fsdp", None, None)


def test_gains_of_norms_over_all_heads_are_sharded_like_the_heads():
    blocks = {"main": block(attention={"heads": 4, "kv_heads": 2, "qk_norm": "rms", "qk_norm_over": "heads"})}
    model = ModelConfig(width=32, depth=2, vocab_size=48, max_length=8, blocks=blocks, head_bias=True)
    params, axes = of(model)
    specs, main = param_shardings(abstract_mesh(tensor=2), params, axes), params["blocks"]["main"]["attention"]
    for name, heads in (("query_norm", 4), ("key_norm", 2)):
        assert main[name]["gain"].shape == (2, heads, 8)
        assert specs["blocks"]["main"]["attention"][name]["gain"].spec == PartitionSpec(None, "tensor", None)
    assert params["head_bias"]["bias"].shape == (48,) and specs["head_bias"]["bias"].spec == PartitionSpec("tensor")


def test_a_dimension_that_an_axis_does_not_divide_is_refused_by_name():
    words = "mesh.tensor=3 is not allowed: it must be a divisor of 4, the key-value heads of parameter blocks/main/.*: "
    with pytest.raises(UserError, match=words + "choose another mesh.tensor, or another attention.kv_heads$"):
        param_shardings(abstract_mesh(tensor=3), *moe_params())


@pytest.mark.parametrize("tensor, larger", [(2, 258), (4, 260)])
def test_an_axis_that_does_not_divide_the_vocabulary_names_a_vocabulary_that_it_divides(tensor, larger):
    model = resolve_model(ModelConfig(width=32, depth=1, vocab_size=257, max_length=8, blocks={"main": block()}))
    words = f"mesh.tensor={tensor} .* 257, the vocabulary of parameter .*, --config.model.vocab_size={larger}$"
    with pytest.raises(UserError, match=words):
        param_shardings(abstract_mesh(tensor=tensor), *of(model))
    param_shardings(abstract_mesh(tensor=tensor), *of(replace(model, vocab_size=larger)))


def test_two_dimensions_on_one_axis_are_an_error(monkeypatch):
    monkeypatch.setitem(letters.SHARDED_BY, "V", (("fsdp",), ()))
    with pytest.raises(ValueError, match=r"embed/table .*: one mesh axis shards two of its dimensions"):
        param_shardings(abstract_mesh(fsdp=2), *moe_params())


@pytest.mark.parametrize(
    "mesh, words",
    [
        (MeshConfig(data=3), "the 4 devices"),
        (MeshConfig(tensor=3), "divides the 4"),
        (MeshConfig(data=0), "at least 1"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(mesh, words):
    with pytest.raises(UserError, match=words):
        mesh_sizes(mesh, 4)


def test_the_data_axis_gets_the_remaining_devices():
    assert mesh_sizes(MeshConfig(fsdp=2), 8)["data"] == 4


@pytest.mark.parametrize(
    "rows, length, words", [(6, 8, "batch_size=6"), (8, 9, "sequence_length=9")]
)
def test_a_batch_that_the_mesh_does_not_divide_is_refused(rows, length, words):
    sizes = mesh_sizes(MeshConfig(fsdp=2, context=2), 8)
    check_batch(sizes, 8, 8, 2)
    with pytest.raises(UserError, match=words):
        check_batch(sizes, rows, length, 1)


@dataclass(frozen=True)
class Device:
    """The attributes of a device that determine its place in a mesh."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "of a test"


def over_slices(sizes: dict, between: str):
    """The slice of the device at each position of the mesh: two slices of 4 devices, listed alternately."""
    devices = [Device(i, i % 2) for i in range(8)]
    sizes = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1, "context": 1} | sizes
    mesh = device_mesh(sizes, devices, between)
    return np.vectorize(lambda device: device.slice_index, otypes=[int])(mesh.devices).squeeze()


@pytest.mark.parametrize(
    "between, sizes",
    [("data", {"data": 2, "fsdp": 4}), ("fsdp", {"fsdp": 4, "tensor": 2}), ("auto", {"fsdp": 4, "tensor": 2})],
)
def test_one_axis_spans_the_slices(between, sizes):
    result = over_slices(sizes, between)
    first, second = np.split(result, 2)
    assert (first == 0).all() and (second == 1).all()


def test_an_axis_that_the_slices_do_not_divide_is_refused():
    with pytest.raises(UserError, match=r"\(data, by mesh.between\) is a multiple of 2 slices"):
        over_slices({"fsdp": 8}, "data")


def test_one_axis_may_be_inferred():
    assert mesh_sizes(MeshConfig(data=2, fsdp=-1), 8)["fsdp"] == 4
    with pytest.raises(UserError, match="mesh.fsdp=-1 is not allowed: mesh.data is -1 already"):
        mesh_sizes(MeshConfig(fsdp=-1), 8)


@pytest.mark.parametrize("axis, words", [("expert", "no experts E"), ("tensor", "a divisor of")])
def test_an_axis_that_shards_nothing_of_the_model_is_refused(axis, words):
    model = resolve_model(ModelConfig(width=33, depth=1, vocab_size=48, max_length=8, blocks={"main": NARROW}))
    with pytest.raises(UserError, match=words):
        param_shardings(abstract_mesh(**{axis: 32}), transformer.abstract(model), transformer.axes(model))


def test_every_letter_has_a_rule_and_every_mesh_axis_shards_some():
    parameters = [axes for config in ALL.values() for axes in jax.tree.leaves(transformer.axes(config))]
    used = {letter for axes in parameters for letter in axes.letters}
    assert used <= letters.SHARDED_BY.keys()
    assert {axis for columns in letters.SHARDED_BY.values() for axes in columns for axis in axes} == set(AXES)
