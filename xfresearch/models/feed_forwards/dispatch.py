"""Tokens to their experts and back, on one device or on a mesh.

On a mesh every device sorts its own T tokens. Experts are cut over `expert`: with more than one part, tokens go to the
devices of their experts and come back by all-to-all. Experts' hidden units are cut over `tensor`: what the parts make of a
token is summed once, after the way back. Their width is cut over `fsdp` and gathered here, in the dtype of the computation,
and its gradient scattered back. The router stays outside.

`by_choice` sends rows, one for each choice, k T of them on average each way. None is ever dropped, so a device has room for
all that could come, min(k parts, E) T rows; it multiplies those that came. `by_slot` and `by_expert` send E C slots of each
sequence, whatever was chosen, and multiply all of them.
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
    """y_BLD: each token through the k experts of its choice, times their gates."""
    where, kind = platform(ctx.mesh), device_kind(ctx.mesh)

    def local(mesh, kernels, x_BLD, expert_BLk, gates_BLk):
        (B, L, D), k, E = x_BLD.shape, expert_BLk.shape[2], experts.count
        order_N = jnp.argsort(expert_BLk.reshape(-1), stable=True)  # N = B L k choices, by expert
        place_Tk = jnp.argsort(order_N).reshape(-1, k)
        x_ND = take(x_BLD.reshape(-1, D), order_N // k, place_Tk)
        sizes_E, parts = jnp.bincount(expert_BLk.reshape(-1), length=E), _parts(mesh, "expert")

        def by_token(rows):
            return take(rows, place_Tk.reshape(-1), order_N[:, None]).reshape(B, L, k, -1)

        def tap(h_NF):
            return ctx.tap("coefficients", by_token(h_NF)).reshape(h_NF.shape)[order_N] if ctx.taps else h_NF

        def mix(x, sizes_E, whole):
            product = partial(grouped_matmul, sizes_E=sizes_E, implementation=ctx.execution.expert_kernel, platform=where, kind=kind)
            return experts(kernels, x, partial(product, whole=whole), tap)

        if parts == 1:
            y_ND = mix(x_ND, sizes_E, whole=True)
        else:
            there, sizes_E = route(sizes_E, "expert", parts)
            ragged = has_ragged(where, kind, ctx.mesh.size)
            x_RD = exchange(x_ND, there, min(k * parts, E) * B * L, ragged)
            y_ND = exchange(mix(x_RD, sizes_E, whole=False), there.back(), k * B * L, ragged)
        return (by_token(y_ND) * gates_BLk[..., None].astype(x_BLD.dtype)).sum(2)

    return _on_devices(local, experts, ctx, x_BLD, "BL", expert_BLk, gates_BLk)


def by_slot(experts, x_BLD, slot_BLk, gates_BLk, slots: int, ctx: Context):
    """y_BLD: each token through those of the E C slots of its sequence that its k choices have, times their gates.

    Slot E C is none.
    """

    def local(mesh, kernels, x_BLD, slot_BLk, gates_BLk):
        (B, L, _), k, S = x_BLD.shape, slot_BLk.shape[2], experts.count * slots
        choice_Lk = jnp.arange(L * k).reshape(L, k)
        choice_BS = jax.vmap(lambda slot_Lk: jnp.full(S, L * k).at[slot_Lk].set(choice_Lk, mode="drop"))(slot_BLk)
        x_BSD = jax.vmap(take)(x_BLD, choice_BS // k, slot_BLk)
        y_BSD = _through(mesh, experts, kernels, x_BSD, ctx)
        y_BND = jax.vmap(take)(y_BSD, slot_BLk.reshape(B, -1), choice_BS[..., None])
        return (y_BND.reshape(B, L, k, -1) * gates_BLk[..., None].astype(x_BLD.dtype)).sum(2)

    return _on_devices(local, experts, ctx, x_BLD, "BL", slot_BLk, gates_BLk)


def by_expert(experts, x_BLD, at_BEC, gates_BEC, ctx: Context):
    """y_BLD: what each expert makes of the C tokens of a sequence that it has chosen, times its gates."""

    def local(mesh, kernels, x_BLD, at_BEC, gates_BEC):
        (B, L, _), at_BS = x_BLD.shape, at_BEC.reshape(x_BLD.shape[0], -1)
        if _parts(mesh, "context") > 1:  # those that are not on this device are after its last one
            at_BS -= L * jax.lax.axis_index("context")
            at_BS = jnp.where(at_BS < 0, L, at_BS)
        x_BSD = jax.vmap(lambda x_LD, at_S: x_LD.at[at_S].get(mode="fill", fill_value=0))(x_BLD, at_BS)
        y_BSD = _through(mesh, experts, kernels, x_BSD, ctx) * gates_BEC.reshape(B, -1, 1).astype(x_BLD.dtype)
        zeros_LD = jnp.zeros((L, y_BSD.shape[-1]), y_BSD.dtype)
        return jax.vmap(lambda y_SD, at_S: zeros_LD.at[at_S].add(y_SD, mode="drop"))(y_BSD, at_BS)

    return _on_devices(local, experts, ctx, x_BLD, "B", at_BEC, gates_BEC)


def _through(mesh, experts, kernels, x_BSD, ctx: Context):
    """y_BSD of the slots S = E C of each sequence, each through its expert.

    Devices along `context` have filled different slots: each computes its share of them, and gets all of them back.
    """
    (B, S, D), E = x_BSD.shape, experts.count
    x_BECD, parts, context = x_BSD.reshape(B, E, S // E, D), _parts(mesh, "expert"), _parts(mesh, "context")
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


def _on_devices(local, experts, ctx: Context, x_BLD, cut: str, choice, gates):
    """local(mesh, kernels, x_BLD, choice, gates) on each device's tokens and its part of the experts: its part of y_BLD.

    cut: the first dimensions of `choice` and `gates` that are cut: BL, tokens, or B, those of a whole sequence.
    """
    kernels, mesh = experts.kernels(x_BLD.dtype), ctx.mesh
    if mesh is None or ctx.taps:  # values that are tapped are those of one device
        return local(None, kernels, x_BLD, choice, gates)
    alone = "1 under moe.expert='softmax', whose hidden units share one sum"
    require(experts.kind != "softmax" or mesh.shape["tensor"] == 1, "mesh.tensor", mesh.shape["tensor"], alone)
    letters = {name: AXES[name].letters for name in kernels}
    cuts = {name: parameter_spec(mesh, letters[name], w.shape, f"experts/{name}") for name, w in kernels.items()}
    tokens = activation_spec(mesh, "BL", x_BLD.shape[:2])
    by = PartitionSpec(*tokens[: len(cut)])

    def on_one(kernels, x_BLD, choice, gates):
        if mesh.shape["fsdp"] > 1:
            kernels = {
                name: jax.lax.all_gather(w, "fsdp", axis=letters[name].index("D"), tiled=True)
                for name, w in kernels.items()
            }
        return local(mesh, kernels, x_BLD, choice, gates)[None]

    run = jax.shard_map(
        on_one,
        mesh=mesh,
        in_specs=(cuts, tokens, by, by),
        out_specs=PartitionSpec("tensor", *tokens),
        check_vma=False,
    )
    # The sum over `tensor` is outside: its derivative then needs no word between devices.
    return jax.lax.reduce(run(kernels, x_BLD, choice, gates), jnp.zeros((), x_BLD.dtype), jax.lax.add, (0,))


def _parts(mesh, axis: str) -> int:
    return 1 if mesh is None else mesh.shape[axis]


@jax.custom_vjp
def take(x_TD, at_N, places_Tk):
    """x_ND, the rows of x at `at`, zeros for one past its end. `places` are those in `at` that hold each row of x.

    So the gradient is gathered too, and nothing has to be added up row by row.
    """
    return x_TD.at[at_N].get(mode="fill", fill_value=0)


def _take_forward(x_TD, at_N, places_Tk):
    return take(x_TD, at_N, places_Tk), places_Tk


def _take_backward(places_Tk, dy_ND):
    return dy_ND.at[places_Tk].get(mode="fill", fill_value=0).sum(1), None, None


take.defvjp(_take_forward, _take_backward)
