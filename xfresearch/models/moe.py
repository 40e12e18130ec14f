"""Sparse mixture of experts: each token is the sum of what a few of E feed-forward networks make of it.

    z_E = x W_router (float32)      s = softmax(z) or sigmoid(z)      y = sum_{e chosen} g_e expert_e(x) + shared(x)

Token choice (Shazeer et al. 2017): a token takes its k highest s + b. The gates g are s, or s over its sum over the k:
softmax so divided is Mixtral (Jiang et al. 2024, sec. 2.1), softmax as it is Switch and OLMoE, sigmoid so divided
DeepSeek-V3 (2024, eq. 12-16). Dropless (Gale et al. 2022), or with capacity: an expert takes the first
C = ceil(capacity k max_length / E) tokens of a sequence that choose it (a token chooses it once, so the order of its own
choices is the same to it); later ones count nothing and the gates left stay as they are. In order of position a later
token never takes the place of an earlier one; in GShard's order, every token's first choice before any second one, it
would, and the model would not be causal.

Expert choice (Zhou et al. 2022, sec. 3.2): an expert takes the C = ceil(capacity k L / E) tokens of the sequence with its
highest s; capacity k is the paper's c. It sees later tokens, so only a model that is not causal may have it.

Balance, per sequence and then averaged over tokens, so that it does not depend on how a batch is cut into microbatches or
over devices (a routing group is one sequence); f_e is the share of choices that fall on e, dropped ones too, P_e the
mean of s_e over its sum:

    'loss'       E sum_e f_e P_e                                            (Switch, eq. 4-6)
    'bias'       b_e, seen by the choice alone, which training/routing.py moves after each update    (DeepSeek-V3, eq. 16)
    z_loss       mean logsumexp(z)^2, whatever the balance                  (ST-MoE, eq. 5)

Parameters: D E + (E + shared) n D F (+ E for b), n = 3 for gated experts and 2 for plain; active: k experts instead of E.
FLOPs per token: 2 D E + 2 (k + shared) n D F, C E / L for k under expert choice, and on a mesh (dispatch.py) with a
capacity.      Cache: E counts with a capacity.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.config import BlockConfig, ModelConfig
from xfresearch.models import costs as c
from xfresearch.models.context import Aux, Context
from xfresearch.models.dispatch import by_choice, by_expert, by_slot
from xfresearch.models.experts import Experts, shared_block, slots
from xfresearch.models.feed_forward import FeedForward, input_width
from xfresearch.models.linear import Linear
from xfresearch.models.variants import ACTIVATIONS


class MixtureOfExperts(nnx.Module):
    def __init__(self, model: ModelConfig, block: BlockConfig, rngs):
        moe = self.config = block.feed_forward.moe
        self.slots = slots(moe, model.max_length)  # of token choice; 0 is all that come
        self.router = Linear(model, (input_width(model, block),), (moe.experts,), False, rngs)
        self.experts = Experts(model, block, rngs)
        self.router_bias = nnx.Param(jnp.zeros(moe.experts, model.param_dtype)) if moe.balance == "bias" else None
        self.shared = FeedForward(model, shared_block(block), rngs) if moe.shared else None

    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the cache (with a capacity: how often each expert was chosen so far), losses and statistics."""
        logits_BLE = ctx.tap("router_logits", self.router(self._router_input(x_BLD, ctx), ctx))
        log_s = jax.nn.log_softmax if self.config.scores == "softmax" else jax.nn.log_sigmoid
        log_BLE = log_s(logits_BLE)
        real_BL = jnp.ones(x_BLD.shape[:2], bool) if ctx.segments_BL is None else ctx.segments_BL > 0
        route = self._token_choice if self.config.routing == "token_choice" else self._expert_choice
        y_BLD, cache, statistics = route(x_BLD, log_BLE, real_BL, ctx, cache)
        if self.shared is not None:
            y_BLD += self.shared(x_BLD, ctx.at("shared"))[0]
        return y_BLD, cache, self._aux(logits_BLE, log_BLE, real_BL, statistics)

    def _router_input(self, x_BLD, ctx: Context):
        """x in float32 or wider, with Switch's noise in training."""
        x_BLD, jitter = x_BLD.astype(jnp.promote_types(x_BLD.dtype, jnp.float32)), self.config.jitter
        if not jitter or ctx.key is None:
            return x_BLD
        return x_BLD * jax.random.uniform(ctx.dropout_key("jitter"), x_BLD.shape, x_BLD.dtype, 1 - jitter, 1 + jitter)

    def _token_choice(self, x_BLD, log_BLE, real_BL, ctx: Context, cache):
        (B, L, _), k, E = x_BLD.shape, self.config.top_k, self.config.experts
        expert_BLk, margin_BL = self._highest(log_BLE)
        log_BLk = jnp.take_along_axis(log_BLE, expert_BLk, -1)
        gates_BLk = jax.nn.softmax(log_BLk, -1) if self.config.renormalise else jnp.exp(log_BLk)
        chosen_BLE = jax.nn.one_hot(expert_BLk, E, dtype=jnp.int32).sum(2) * real_BL[..., None]
        statistics = {"router_load": chosen_BLE.sum(1), "router_margin": (margin_BL * real_BL).sum(1)}
        if self.slots:
            rank_BLE = jnp.cumsum(chosen_BLE, 1) + (cache["counts"][:, None] if cache else 0)
            rank_BLk = jnp.take_along_axis(rank_BLE, expert_BLk, -1)
            kept_BLk = (rank_BLk <= self.slots) & real_BL[..., None]
            gates_BLk, cache = jnp.where(kept_BLk, gates_BLk, 0), cache and {"counts": rank_BLE[:, -1]}
        dropped_BLk = ~kept_BLk & real_BL[..., None] if self.slots else jnp.zeros((B, L, k), bool)
        statistics["router_drops"] = dropped_BLk.sum((1, 2), dtype=jnp.int32)
        gates_BLk = ctx.tap("gates", gates_BLk)
        if self.slots and ctx.mesh is not None and cache is None and not ctx.taps:
            C = min(self.slots, L)
            slot_BLk = jnp.where(kept_BLk, C * expert_BLk + rank_BLk - 1, C * E)
            return by_slot(self.experts, x_BLD, slot_BLk, gates_BLk, C, ctx), cache, statistics
        return by_choice(self.experts, x_BLD, expert_BLk, gates_BLk, ctx), cache, statistics

    def _highest(self, log_BLE):
        """The k experts [B, L, k] with the highest s + b, and by how much [B, L] the last one leads the next (0 for all E).

        Without b, log s puts them in the same order and does not saturate.
        """
        k, bias = self.config.top_k, self.router_bias
        by_BLE = jax.lax.stop_gradient(log_BLE if bias is None else jnp.exp(log_BLE) + bias[...].astype(log_BLE.dtype))
        top, expert = jax.lax.top_k(by_BLE, min(k + 1, self.config.experts))
        top = jnp.exp(top) if bias is None else top
        return expert[..., :k], top[..., k - 1] - top[..., -1]

    def _expert_choice(self, x_BLD, log_BLE, real_BL, ctx: Context, cache):
        C = slots(self.config, x_BLD.shape[1])
        log_BEL = jnp.where(real_BL[..., None], log_BLE, -jnp.inf).swapaxes(1, 2)
        log_BEC, at_BEC = jax.lax.top_k(log_BEL, C)
        gates_BEC = ctx.tap("gates", jnp.exp(log_BEC))
        y_BLD = by_expert(self.experts, x_BLD, at_BEC, gates_BEC, ctx)
        return y_BLD, cache, {"router_load": (log_BEC > -jnp.inf).sum(-1, dtype=jnp.int32)}

    def _aux(self, logits_BLE, log_BLE, real_BL, statistics: dict) -> Aux:
        """Losses, and as sums over a sequence's real tokens: choices of each expert and probability [B, E], entropy of the
        router's distribution, lead of the last choice over the next one, choices dropped [B]."""
        moe, log_p = self.config, jax.nn.log_softmax(log_BLE, -1)
        p_BLE = jnp.exp(log_p) * real_BL[..., None]
        mass_BE, load_BE = p_BLE.sum(1), statistics["router_load"]
        z_BL = jnp.square(jax.nn.logsumexp(logits_BLE, -1)) * real_BL
        losses = {"router_z_loss": moe.z_loss * z_BL.sum(-1)}
        if moe.balance == "loss":
            choices_B1 = jnp.maximum(moe.top_k * real_BL.sum(-1, keepdims=True), 1)
            share_BE = load_BE.astype(mass_BE.dtype) / choices_B1
            losses["balance_loss"] = moe.balance_loss * moe.experts * (share_BE * mass_BE).sum(-1)
        statistics |= {"router_mass": mass_BE, "router_entropy": -(p_BLE * log_p).sum((1, 2))}
        return Aux(losses, jax.lax.stop_gradient(statistics))

    def init_cache(self, batch: int, length: int) -> dict:
        """With a capacity, how often each of `batch` sequences has chosen each expert so far."""
        return {"counts": jnp.zeros((batch, self.config.experts), jnp.int32)} if self.slots else {}

    @staticmethod
    def costs(model: ModelConfig, block: BlockConfig, length: int) -> c.Costs:
        moe, D, F = block.feed_forward.moe, input_width(model, block), block.feed_forward.hidden
        expert = (2 if ACTIVATIONS[moe.expert].gated else 1) * D * F + F * model.width
        used = moe.top_k * expert
        if moe.routing == "expert_choice":  # by an average token, rounded up
            used = -(-moe.experts * slots(moe, length) * expert // length)
        total = c.linear((D,), (moe.experts,), False) + c.weights(moe.experts * expert, used)
        total += c.weights(moe.experts if moe.balance == "bias" else 0)
        total += FeedForward.costs(model, shared_block(block), length) if moe.shared else c.Costs()
        return total + c.Costs(flops_per_token=2 * used)
