"""Sends tokens to their experts and back, on one device or on a mesh.

On a mesh every device sorts its own T tokens. The experts are sharded over three mesh axes:

expert    whole experts: with more than one shard, tokens go to the devices of their experts and back by all-to-all
tensor    hidden units: the partial outputs for a token are summed once, after the way back; the first device adds the bias
fsdp      width: the kernels are gathered here, in the dtype of the computation, and their gradients are scattered back

The router is not part of this.

`by_choice` sends one row for each choice, on average k T each way. It drops no row, so a device has a buffer for all rows
that could arrive, min(k parts, E) T, but it multiplies only the rows that did arrive. `by_slot` and `by_expert` always send
E C slots of each sequence, and multiply all of them.

Taps see values in the order of tokens. A pass with taps of the hidden units of experts therefore sends its rows there and
back for each of the experts' matrices.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from xfresearch.kernels.blocked_rows import BIAS, with_bias
from xfresearch.kernels.grouped_matmul import grouped
from xfresearch.models.context import Context
from xfresearch.models.feed_forwards.exchange import exchange, has_ragged, route
from xfresearch.models.feed_forwards.experts import AXES, TAPS
from xfresearch.models.parameters import plus
from xfresearch.runtime.errors import require
from xfresearch.sharding.devices import device_kind, platform
from xfresearch.sharding.partition import activation_spec, parameter_spec


def by_choice(experts, x_BLD, expert_BLk, gates_BLk, ctx: Context):
    """y_BLD: the sum of the outputs of a token's k experts, times their gates."""
    if ctx.wants(*TAPS):
        x_BLkD = jnp.broadcast_to(x_BLD[:, :, None], (*expert_BLk.shape, x_BLD.shape[-1]))
        gates_BLk1 = gates_BLk[..., None].astype(x_BLD.dtype)
        return experts(x_BLkD, partial(_products, experts, expert_BLk, ctx), ctx.tap, gates_BLk1).sum(2)

    def local(mesh, weights, x_BLD, expert_BLk, gates_BLk):
        def run(products, x_RD, gates_R1=None):
            return experts(x_RD, products, gates=gates_R1)

        return _sent(mesh, weights, run, x_BLD.reshape(-1, x_BLD.shape[-1]), expert_BLk, ctx, gates_BLk).sum(2)

    weights = experts.weights(x_BLD.dtype)
    return _on_devices(local, experts, weights, ctx, (x_BLD, expert_BLk, gates_BLk), ("BLD", "BLN", "BLN"), "BLD")


def _products(experts, expert_BLk, ctx: Context, x_BLkI, names: tuple[str, ...], gates_BLk1=None):
    """y_BLkO of each name: the product of each choice's row with this kernel of its expert."""
    return [_product(experts, expert_BLk, ctx, x_BLkI, name, gates_BLk1) for name in names]


def _product(experts, expert_BLk, ctx: Context, x_BLkI, name: str, gates_BLk1):
    """y_BLkO: the product of each choice's row with the kernel `name` of its expert, with its bias times the gates."""

    def local(mesh, weights, x_BLkI, expert_BLk):
        x_NI = x_BLkI.reshape(-1, x_BLkI.shape[-1])
        return _sent(mesh, weights, lambda products, x_RI: products(x_RI, (name,))[0], x_NI, expert_BLk, ctx)

    weights = experts.weights(x_BLkI.dtype)
    letters = ("BLNF", "BLND") if name == "down" else ("BLND", "BLNF")
    kernel = {name: weights[name]}
    y_BLkO = _on_devices(local, experts, kernel, ctx, (x_BLkI, expert_BLk), (letters[0], "BLN"), letters[1])
    return with_bias(y_BLkO, weights[name + BIAS][expert_BLk], gates_BLk1) if name + BIAS in weights else y_BLkO


def _sent(mesh, weights: dict, run, x_TI, expert_BLk, ctx: Context, gates_BLk=None):
    """y_BLkO: the output of each choice's expert, in the order of tokens, times its gate if there are gates.

    x_TI: a row for each token, or one for each choice. run(products, x_RI[, gates_R1]): the outputs of rows that
    are sorted by expert; products(x, names, gates) is that of `Experts`. Gates stay on the device
    of the token: where rows are sent to other devices, they multiply the outputs that come back.
    """
    B, L, k = expert_BLk.shape
    E = next(iter(weights.values())).shape[0] * _parts(mesh, "expert")
    order_N = jnp.argsort(expert_BLk.reshape(-1), stable=True)  # N = B L k choices, sorted by expert
    row_N = jnp.zeros_like(order_N).at[order_N].set(jnp.arange(B * L * k), unique_indices=True)  # of each choice
    each = len(order_N) // len(x_TI)
    x_NI = take(x_TI, order_N // each, row_N.reshape(-1, each))
    gates = () if gates_BLk is None else (take(gates_BLk.reshape(-1, 1).astype(x_TI.dtype), order_N, row_N[:, None]),)
    sizes_E = jnp.bincount(expert_BLk.reshape(-1), length=E)
    parts = _parts(mesh, "expert")
    here, kind = platform(ctx.mesh), device_kind(ctx.mesh)
    saved = tuple(name for name in weights if name != "down" and not name.endswith(BIAS))
    chosen = ctx.execution.expert_kernel
    apply = partial(grouped, run, weights=weights, saved=saved, implementation=chosen, platform=here, kind=kind)
    if parts == 1:
        y_NO = apply((x_NI, *gates), sizes_E=sizes_E)
    else:
        to_experts, sizes_E = route(sizes_E, "expert", parts)
        ragged = has_ragged(here, kind, ctx.mesh.size)
        x_RI = exchange(x_NI, to_experts, min(k * parts, E) * B * L, ragged)
        y_NO = exchange(apply((x_RI,), sizes_E=sizes_E, whole=False), to_experts.back(), k * B * L, ragged)
        y_NO = math.prod(gates, start=y_NO)
    return take(y_NO, row_N, order_N[:, None]).reshape(B, L, k, -1)


def by_slot(experts, x_BLD, slot_BLk, gates_BLk, slots: int, ctx: Context):
    """y_BLD: the sum of the outputs of a token's experts, times their gates.

    slot_BLk: the slots of a token's k choices, among the E C slots of its sequence; E C for a dropped choice.
    """

    def local(mesh, weights, x_BLD, slot_BLk, gates_BLk):
        B, L, _ = x_BLD.shape
        k = slot_BLk.shape[2]
        S = experts.count * slots
        choice_Lk = jnp.arange(L * k).reshape(L, k)
        choice_BS = jax.vmap(lambda slot_Lk: jnp.full(S, L * k).at[slot_Lk].set(choice_Lk, mode="drop"))(slot_BLk)
        x_BSD = jax.vmap(take)(x_BLD, choice_BS // k, slot_BLk)
        y_BSD = _apply_to_slots(mesh, experts, weights, x_BSD, ctx)
        y_BND = jax.vmap(take)(y_BSD, slot_BLk.reshape(B, -1), choice_BS[..., None])
        return (y_BND.reshape(B, L, k, -1) * gates_BLk[..., None].astype(x_BLD.dtype)).sum(2)

    weights = experts.weights(x_BLD.dtype)
    return _on_devices(local, experts, weights, ctx, (x_BLD, slot_BLk, gates_BLk), ("BLD", "BLN", "BLN"), "BLD")


def by_expert(experts, x_BLD, at_BEC, gates_BEC, ctx: Context):
    """y_BLD: the sum of the experts' outputs for the tokens that they chose, times their gates.

    at_BEC: the positions of the C tokens of a sequence that each expert chose.
    """

    def local(mesh, weights, x_BLD, at_BEC, gates_BEC):
        B, L, _ = x_BLD.shape
        at_BS = at_BEC.reshape(B, -1)
        if _parts(mesh, "context") > 1:  # positions on other devices become out of range
            at_BS -= L * jax.lax.axis_index("context")
            at_BS = jnp.where(at_BS < 0, L, at_BS)
        x_BSD = jax.vmap(lambda x_LD, at_S: x_LD.at[at_S].get(mode="fill", fill_value=0))(x_BLD, at_BS)
        y_BSD = _apply_to_slots(mesh, experts, weights, x_BSD, ctx)
        y_BSD *= gates_BEC.reshape(B, -1, 1).astype(x_BLD.dtype)
        zeros_LD = jnp.zeros((L, y_BSD.shape[-1]), y_BSD.dtype)
        return jax.vmap(lambda y_SD, at_S: zeros_LD.at[at_S].add(y_SD, mode="drop"))(y_BSD, at_BS)

    weights = experts.weights(x_BLD.dtype)
    if ctx.wants(*TAPS):  # taps see the slots of all experts
        return local(None, weights, x_BLD, at_BEC, gates_BEC)
    return _on_devices(local, experts, weights, ctx, (x_BLD, at_BEC, gates_BEC), ("BLD", "BNN", "BNN"), "BLD")


def _apply_to_slots(mesh, experts, weights: dict, x_BSD, ctx: Context):
    """y_BSD: the output of the expert of each slot, for the S = E C slots of each sequence.

    Devices along `context` have filled different slots. Each computes its share of all slots, then gathers the rest.
    """
    B, S, D = x_BSD.shape
    E = experts.count
    x_BECD = x_BSD.reshape(B, E, S // E, D)
    parts = _parts(mesh, "expert")
    context = _parts(mesh, "context")
    if context > 1:
        x_BECD = jnp.pad(x_BECD, ((0, 0), (0, 0), (0, -(S // E) % context), (0, 0)))
        x_BECD = jax.lax.psum_scatter(x_BECD, "context", scatter_dimension=2, tiled=True)
    if parts > 1:
        x_BECD = jax.lax.all_to_all(x_BECD, "expert", split_axis=1, concat_axis=0, tiled=True)

    def product(x_BECI, name: str):
        y_BECO = jnp.einsum("BECI,EIO->BECO", x_BECI, weights[name])
        return plus(y_BECO, weights[name + BIAS][:, None]) if name + BIAS in weights else y_BECO

    tap = ctx.tap if ctx.wants(*TAPS) else None
    y_BECD = experts(x_BECD, lambda x_BECI, names, gates=None: [product(x_BECI, name) for name in names], tap)
    if parts > 1:
        y_BECD = jax.lax.all_to_all(y_BECD, "expert", split_axis=0, concat_axis=1, tiled=True)
    if context > 1:
        y_BECD = jax.lax.all_gather(y_BECD, "context", axis=2, tiled=True)[:, :, : S // E]
    return y_BECD.reshape(B, S, -1)


def _on_devices(local, experts, weights: dict, ctx: Context, arrays: tuple, letters: tuple[str, ...], out: str):
    """Runs local(mesh, weights, *arrays) on each device with its shards of tokens and experts.

    letters, out: the dimensions of the arrays and of the result: B and L of tokens, F of hidden units; other dimensions
    are not sharded. A result without F is summed over the devices along `tensor`.
    """
    mesh = ctx.mesh
    if mesh is None:
        return local(None, weights, *arrays)
    allowed = "1 with moe.expert='softmax': the softmax is over all hidden units of an expert"
    require(experts.kind != "softmax" or mesh.shape["tensor"] == 1, "mesh.tensor", mesh.shape["tensor"], allowed)
    axes = {name: AXES[name].letters for name in weights}
    specs = {name: parameter_spec(mesh, axes[name], w.shape, f"experts/{name}") for name, w in weights.items()}
    tokens = activation_spec(mesh, "BL", arrays[0].shape[:2])
    sharded = {"B": tokens[0], "L": tokens[1], "F": "tensor"}
    in_specs = tuple(PartitionSpec(*map(sharded.get, each)) for each in letters)
    partial_sums = "F" not in out

    def on_device(weights, *arrays):
        if mesh.shape["fsdp"] > 1:
            wide = {name: w for name, w in weights.items() if "D" in axes[name]}
            weights = weights | {
                name: jax.lax.all_gather(w, "fsdp", axis=axes[name].index("D"), tiled=True) for name, w in wide.items()
            }
        if mesh.shape["tensor"] > 1 and (last := "down" + BIAS) in weights:
            weights = weights | {last: jnp.where(jax.lax.axis_index("tensor") == 0, weights[last], 0)}
        y = local(mesh, weights, *arrays)
        return y[None] if partial_sums else y

    out_specs = PartitionSpec(*(["tensor"] if partial_sums else []), *map(sharded.get, out))
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(specs, *in_specs), out_specs=out_specs, check_vma=False)
    y = run(weights, *arrays)
    # The sum over `tensor` comes after shard_map, so that its derivative needs no communication.
    return jax.lax.reduce(y, jnp.zeros((), y.dtype), jax.lax.add, (0,)) if partial_sums else y


def _parts(mesh, axis: str) -> int:
    """The number of shards along a mesh axis."""
    return 1 if mesh is None else mesh.shape[axis]


@jax.custom_vjp
def take(x_TD, at_N, copies_Tk):
    """x_ND: the rows of x at the indices `at`, zeros for an index out of range. `copies` are the rows of the result
    that hold each row of x, so that the gradient is a gather too, instead of a scatter-add row by row."""
    return x_TD.at[at_N].get(mode="fill", fill_value=0)


def _take_forward(x_TD, at_N, copies_Tk):
    return take(x_TD, at_N, copies_Tk), copies_Tk


def _take_backward(copies_Tk, dy_ND):
    return dy_ND.at[copies_Tk].get(mode="fill", fill_value=0).sum(1), None, None


take.defvjp(_take_forward, _take_backward)
