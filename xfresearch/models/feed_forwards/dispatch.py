"""Sends tokens to their experts and back, on one device or on a mesh.

On a mesh every device sorts its own T tokens. The experts are sharded over three mesh axes:

expert    whole experts: with more than one shard, tokens go to the devices of their experts and back by all-to-all
tensor    hidden units: the partial outputs for a token are summed once, after the way back
fsdp      width: the kernels are gathered here, in the dtype of the computation, and their gradients are scattered back

The router is outside of this.

`by_choice` sends one row for each choice, on average k T each way. It never drops one, so a device has a buffer for all
rows that could arrive, min(k parts, E) T, but multiplies only those that did. `by_slot` and `by_expert` always send E C
slots of each sequence, and multiply all of them.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from xfresearch.errors import require
from xfresearch.kernels.grouped_matmul import grouped_matmul
from xfresearch.models.context import Context
from xfresearch.models.feed_forwards.exchange import exchange, has_ragged, route
from xfresearch.models.feed_forwards.experts import AXES
from xfresearch.sharding.devices import device_kind, platform
from xfresearch.sharding.partition import activation_spec, parameter_spec


def by_choice(experts, x_BLD, expert_BLk, gates_BLk, ctx: Context):
    """y_BLD: the sum of the outputs of a token's k experts, times their gates."""
    platform_name = platform(ctx.mesh)
    kind = device_kind(ctx.mesh)

    def local(mesh, kernels, x_BLD, expert_BLk, gates_BLk):
        B, L, D = x_BLD.shape
        k = expert_BLk.shape[2]
        E = experts.count
        order_N = jnp.argsort(expert_BLk.reshape(-1), stable=True)  # N = B L k choices, sorted by expert
        row_Tk = jnp.argsort(order_N).reshape(-1, k)  # the row of each choice in this order
        x_ND = take(x_BLD.reshape(-1, D), order_N // k, row_Tk)
        sizes_E = jnp.bincount(expert_BLk.reshape(-1), length=E)
        parts = _parts(mesh, "expert")

        def by_token(rows):
            return take(rows, row_Tk.reshape(-1), order_N[:, None]).reshape(B, L, k, -1)

        def tap(h_NF):
            return ctx.tap("coefficients", by_token(h_NF)).reshape(h_NF.shape)[order_N] if ctx.taps else h_NF

        def apply_experts(x, sizes_E, whole):
            product = partial(
                grouped_matmul,
                sizes_E=sizes_E,
                implementation=ctx.execution.expert_kernel,
                platform=platform_name,
                kind=kind,
                whole=whole,
            )
            return experts(kernels, x, product, tap)

        if parts == 1:
            y_ND = apply_experts(x_ND, sizes_E, whole=True)
        else:
            to_experts, sizes_E = route(sizes_E, "expert", parts)
            ragged = has_ragged(platform_name, kind, ctx.mesh.size)
            x_RD = exchange(x_ND, to_experts, min(k * parts, E) * B * L, ragged)
            y_ND = exchange(apply_experts(x_RD, sizes_E, whole=False), to_experts.back(), k * B * L, ragged)
        return (by_token(y_ND) * gates_BLk[..., None].astype(x_BLD.dtype)).sum(2)

    return _on_devices(local, experts, ctx, x_BLD, "BL", expert_BLk, gates_BLk)


def by_slot(experts, x_BLD, slot_BLk, gates_BLk, slots: int, ctx: Context):
    """y_BLD: the sum of the outputs of a token's experts, times their gates.

    slot_BLk: the slots of a token's k choices, among the E C slots of its sequence; E C for a dropped choice.
    """

    def local(mesh, kernels, x_BLD, slot_BLk, gates_BLk):
        B, L, _ = x_BLD.shape
        k = slot_BLk.shape[2]
        S = experts.count * slots
        choice_Lk = jnp.arange(L * k).reshape(L, k)
        choice_BS = jax.vmap(lambda slot_Lk: jnp.full(S, L * k).at[slot_Lk].set(choice_Lk, mode="drop"))(slot_BLk)
        x_BSD = jax.vmap(take)(x_BLD, choice_BS // k, slot_BLk)
        y_BSD = _apply_to_slots(mesh, experts, kernels, x_BSD, ctx)
        y_BND = jax.vmap(take)(y_BSD, slot_BLk.reshape(B, -1), choice_BS[..., None])
        return (y_BND.reshape(B, L, k, -1) * gates_BLk[..., None].astype(x_BLD.dtype)).sum(2)

    return _on_devices(local, experts, ctx, x_BLD, "BL", slot_BLk, gates_BLk)


def by_expert(experts, x_BLD, at_BEC, gates_BEC, ctx: Context):
    """y_BLD: the sum of the experts' outputs for the tokens that they chose, times their gates.

    at_BEC: the positions of the C tokens of a sequence that each expert chose.
    """

    def local(mesh, kernels, x_BLD, at_BEC, gates_BEC):
        B, L, _ = x_BLD.shape
        at_BS = at_BEC.reshape(B, -1)
        if _parts(mesh, "context") > 1:  # positions on other devices become out of range
            at_BS -= L * jax.lax.axis_index("context")
            at_BS = jnp.where(at_BS < 0, L, at_BS)
        x_BSD = jax.vmap(lambda x_LD, at_S: x_LD.at[at_S].get(mode="fill", fill_value=0))(x_BLD, at_BS)
        y_BSD = _apply_to_slots(mesh, experts, kernels, x_BSD, ctx)
        y_BSD *= gates_BEC.reshape(B, -1, 1).astype(x_BLD.dtype)
        zeros_LD = jnp.zeros((L, y_BSD.shape[-1]), y_BSD.dtype)
        return jax.vmap(lambda y_SD, at_S: zeros_LD.at[at_S].add(y_SD, mode="drop"))(y_BSD, at_BS)

    return _on_devices(local, experts, ctx, x_BLD, "B", at_BEC, gates_BEC)


def _apply_to_slots(mesh, experts, kernels, x_BSD, ctx: Context):
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

    def product(x_BECI, w_EIO):
        return jnp.einsum("BECI,EIO->BECO", x_BECI, w_EIO)

    y_BECD = experts(kernels, x_BECD, product, partial(ctx.tap, "coefficients"))
    if parts > 1:
        y_BECD = jax.lax.all_to_all(y_BECD, "expert", split_axis=0, concat_axis=1, tiled=True)
    if context > 1:
        y_BECD = jax.lax.all_gather(y_BECD, "context", axis=2, tiled=True)[:, :, : S // E]
    return y_BECD.reshape(B, S, -1)


def _on_devices(local, experts, ctx: Context, x_BLD, sharded: str, choice, gates):
    """Runs local(mesh, kernels, x_BLD, choice, gates) on each device with its shards of tokens and experts.

    sharded: the first dimensions of `choice` and `gates`, which are sharded: BL for tokens, B for whole sequences.
    """
    kernels = experts.kernels(x_BLD.dtype)
    mesh = ctx.mesh
    if mesh is None or ctx.taps:  # taps need the values of all tokens on one device
        return local(None, kernels, x_BLD, choice, gates)
    allowed = "1 with moe.expert='softmax': the softmax is over all hidden units of an expert"
    require(experts.kind != "softmax" or mesh.shape["tensor"] == 1, "mesh.tensor", mesh.shape["tensor"], allowed)
    letters = {name: AXES[name].letters for name in kernels}
    specs = {name: parameter_spec(mesh, letters[name], w.shape, f"experts/{name}") for name, w in kernels.items()}
    tokens = activation_spec(mesh, "BL", x_BLD.shape[:2])
    choices = PartitionSpec(*tokens[: len(sharded)])

    def on_device(kernels, x_BLD, choice, gates):
        if mesh.shape["fsdp"] > 1:
            kernels = {
                name: jax.lax.all_gather(w, "fsdp", axis=letters[name].index("D"), tiled=True)
                for name, w in kernels.items()
            }
        return local(mesh, kernels, x_BLD, choice, gates)[None]

    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(specs, tokens, choices, choices),
        out_specs=PartitionSpec("tensor", *tokens),
        check_vma=False,
    )
    # The sum over `tensor` is outside of shard_map, so that its derivative needs no communication.
    return jax.lax.reduce(run(kernels, x_BLD, choice, gates), jnp.zeros((), x_BLD.dtype), jax.lax.add, (0,))


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
