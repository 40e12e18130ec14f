"""Sparse mixture of experts, top-k of E, dropless (Jiang et al. 2024, Mixtral, eq. 1; Gale et al. 2022, MegaBlocks).

    z_E = x W_router (float32)      g = softmax over the k largest z      y = sum_{e in top-k} g_e expert_e(x)

Auxiliary losses, per sequence and then averaged over tokens, so that they do not depend on how a batch is cut into
microbatches or over devices (a routing group is one sequence):

    balance_loss = E sum_e f_e P_e     f_e: share of the k choices that fall on e, P_e: mean softmax(z)_e (Switch, eq. 4-6)
    z_loss       = mean logsumexp(z)^2                                                               (ST-MoE, eq. 5)

Parameters: D E + E * n D F, n = 3 for gated experts and 2 for plain; active: D E + k n D F.
FLOPs per token: 2 D E + 2 k n D F.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.config import BlockConfig, ModelConfig
from xfresearch.kernels.grouped_matmul import grouped_matmul
from xfresearch.models import costs as c
from xfresearch.models.context import Context
from xfresearch.models.layouts import output_scale
from xfresearch.models.linear import Linear, draw, kernel_std
from xfresearch.models.variants import ACTIVATIONS, load


class Experts(nnx.Module):
    """E feed-forward networks, their kernels stacked."""

    def __init__(self, model: ModelConfig, block: BlockConfig, rngs):
        moe, D, F = block.feed_forward.moe, model.width, block.feed_forward.hidden
        activation = ACTIVATIONS[moe.expert]
        self.activation, self.kernel = load(activation.function), moe.kernel
        into = (moe.experts, D, F)
        self.up = nnx.Param(draw(rngs.params(), into, kernel_std(model, D), model))
        self.gate = nnx.Param(draw(rngs.params(), into, kernel_std(model, D), model)) if activation.gated else None
        std = output_scale(model, block) * kernel_std(model, F)
        self.down = nnx.Param(draw(rngs.params(), (moe.experts, F, D), std, model))

    def __call__(self, x_TD, sizes_E, ctx: Context):
        """y_TD: rows of x, sorted by expert, `sizes_E` of them for each, each through its expert."""

        def matmul(x, kernel):
            return grouped_matmul(x, kernel[...].astype(x.dtype), sizes_E, implementation=self.kernel)

        h_TF = matmul(x_TD, self.up)
        h_TF = self.activation(h_TF) if self.gate is None else self.activation(matmul(x_TD, self.gate)) * h_TF
        return matmul(ctx.tap("hidden", h_TF), self.down)


class MixtureOfExperts(nnx.Module):
    def __init__(self, model: ModelConfig, block: BlockConfig, rngs):
        self.config = block.feed_forward.moe
        self.router = Linear(model, (model.width,), (self.config.experts,), False, rngs)
        self.experts = Experts(model, block, rngs)

    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, no cache, and the auxiliary losses [B], each the sum over a sequence's tokens."""
        B, L, D = x_BLD.shape
        k = self.config.top_k
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        logits_BLE = ctx.tap("router_logits", self.router(x_BLD.astype(wide)))
        top_BLk, expert_BLk = jax.lax.top_k(logits_BLE, k)
        gates_BLk = ctx.tap("gates", jax.nn.softmax(top_BLk, -1))

        expert_T = expert_BLk.reshape(-1)  # one entry for every choice: T = B L k
        order_T = jnp.argsort(expert_T, stable=True)
        sizes_E = jnp.bincount(expert_T, length=self.config.experts)
        y_TD = self.experts(x_BLD.reshape(-1, D)[order_T // k], sizes_E, ctx)
        y_BLkD = jnp.zeros_like(y_TD).at[order_T].set(y_TD, unique_indices=True).reshape(B, L, k, D)
        y_BLD = (y_BLkD * gates_BLk[..., None].astype(x_BLD.dtype)).sum(2)
        return y_BLD, cache, self._losses(logits_BLE, expert_BLk, ctx.segments_BL)

    def _losses(self, logits_BLE, expert_BLk, segments_BL) -> dict:
        E, k = self.config.experts, self.config.top_k
        mask_BL1 = jnp.ones_like(logits_BLE[..., :1]) if segments_BL is None else (segments_BL > 0)[..., None]
        tokens_B = mask_BL1.sum((1, 2), dtype=logits_BLE.dtype)
        chosen_BLE = jax.nn.one_hot(expert_BLk, E, dtype=logits_BLE.dtype).sum(2) / k
        share_BE = (chosen_BLE * mask_BL1).sum(1) / jnp.maximum(tokens_B, 1)[:, None]
        mass_BE = (jax.nn.softmax(logits_BLE, -1) * mask_BL1).sum(1)
        z_BL = jnp.square(jax.nn.logsumexp(logits_BLE, -1)) * mask_BL1[..., 0]
        return {
            "balance_loss": self.config.balance_loss * E * (share_BE * mass_BE).sum(-1),
            "router_z_loss": self.config.z_loss * z_BL.sum(-1),
        }

    def init_cache(self, batch: int, length: int) -> dict:
        return {}

    @staticmethod
    def costs(model: ModelConfig, block: BlockConfig, length: int) -> c.Costs:
        moe, D, F = block.feed_forward.moe, model.width, block.feed_forward.hidden
        expert = (3 if ACTIVATIONS[moe.expert].gated else 2) * D * F
        total = c.linear((D,), (moe.experts,), False) + c.weights(moe.experts * expert, moe.top_k * expert)
        return total + c.Costs(flops_per_token=2 * moe.top_k * expert)
