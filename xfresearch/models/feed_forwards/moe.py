"""Sparse mixture of experts: the output for a token is a weighted sum of the outputs of a few of E networks.

    z_E = x W_router (float32)      s = softmax(z) or sigmoid(z)      y = sum_{e chosen} g_e expert_e(x) + shared(x)

Token choice (Shazeer et al. 2017): a token uses the k experts with its highest s + b. The gates g are s, or s divided
by its sum over these k. Divided softmax is Mixtral (Jiang et al. 2024, sec. 2.1), plain softmax is Switch and OLMoE,
divided sigmoid is DeepSeek-V3 (2024, eq. 12-16). Without a capacity no choice is dropped (Gale et al. 2022). With a
capacity, an expert takes the first C = ceil(capacity k max_length / E) tokens of a sequence that choose it. (A token
chooses an expert at most once, so the order of its choices does not matter.) Later choices are dropped: they add
nothing, and the other gates do not change. Because the order is that of positions, a later token never displaces an
earlier one. In GShard's order, first choices of all tokens before second ones, it would, and the model would not be
causal.

Expert choice (Zhou et al. 2022, sec. 3.2): an expert takes the C = ceil(capacity k L / E) tokens of the sequence with
its highest s; capacity k is the paper's c. The choice depends on later tokens, so the model must not be causal.

Load balance. Losses are computed for each sequence and then averaged over tokens, so that they do not depend on how a
batch is split into microbatches or over devices (a routing group is one sequence). f_e is the share of choices of
expert e, including dropped ones. P_e is the mean of s_e divided by its sum over experts:

    'loss'       E sum_e f_e P_e                                              (Switch, eq. 4-6)
    'bias'       b_e, used only in the choice, which `after_update` changes   (DeepSeek-V3, eq. 16)
    z_loss       mean logsumexp(z)^2, with every kind of balance              (ST-MoE, eq. 5)

Biases (gpt-oss, OpenAI 2025): one of the router's logits, which z-losses and every choice read, and those of each expert's
maps, which are multiplied by the gates like the rest of its output.

Parameters: D E + (E + shared) n D F (+ E for b), n = 3 for gated experts, 2 for plain ones; with biases E of the router,
and (n - 1) F + D of each expert and of the shared ones, whose F is theirs together; active: k experts, not E.
FLOPs per token: 2 D E + 2 (k + shared) n D F, with C E / L for k in expert choice, and with a capacity on a mesh
(dispatch.py).
Cache: E counts with a capacity.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from xfresearch.kernels.choice import KernelChoice
from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.kernels.grouped_matmul import Call, choose_grouped_matmul
from xfresearch.models.context import Aux, Context
from xfresearch.models.costs import Costs, weights
from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.feed_forwards.dense import FeedForward, GatedHidden, HiddenOptions
from xfresearch.models.feed_forwards.dispatch import by_choice, by_expert, by_slot
from xfresearch.models.feed_forwards.experts import TAPS, Experts, shared_place, slots
from xfresearch.models.linear import Linear, Shape
from xfresearch.models.parameters import parameter
from xfresearch.models.place import Place, Rows
from xfresearch.models.sublayer import Memory, MemoryPart, SublayerConfig, SublayerModule, Traffic, reads
from xfresearch.options.fields import changed, group, option, where
from xfresearch.runtime.errors import require
from xfresearch.sharding.devices import platform

BIASES = ("router", "experts")  # values of moe.bias
if TYPE_CHECKING:  # a checker cannot read the values of a table
    Expert = str
else:
    Expert = Literal[*[name for name, activation in ACTIVATIONS.items() if not activation.norm]]


@dataclass(frozen=True)
class MoeConfig:
    experts: int = option(8, "number of experts E", low=1)
    top_k: int = option(2, "number of experts k that each token uses", low=1)
    expert: Expert = option("swiglu", "activation of each expert")
    routing: Literal["token_choice", "expert_choice"] = option(
        "token_choice", "tokens choose experts, or experts choose tokens (not with model.causal)"
    )
    scores: Literal["softmax", "sigmoid"] = option("softmax", "function from router logits to scores s")
    renormalise: bool = option(True, "gates are s divided by its sum over the chosen experts; False: gates are s")
    capacity: float = option(
        0.0,
        "capacity factor: an expert takes at most capacity * top_k * L / E tokens of a sequence; 0 for no limit",
        low=0.0,
    )
    bias: tuple[str, ...] = option(
        (), "biases: names among 'router' (of its logits) and 'experts' (of the projections of each, and of shared ones)"
    )
    shared: int = option(0, "number of shared experts, which every token uses", low=0)
    jitter: float = option(
        0.0,
        "noise in training: the router reads x * uniform(1 - jitter, 1 + jitter)",
        low=0.0,
        high=0.99,
        decides="training",
    )
    balance: Literal["loss", "bias", "none"] = option(
        "loss", "load balance: by balance_loss, or by a bias on the scores that affects only the choice"
    )
    balance_loss: float = option(
        0.01,
        "weight of the load-balance loss (Switch, eq. 4, per sequence)",
        low=0.0,
        decides="training",
        needs=where(balance="loss"),
    )
    bias_speed: float = option(
        0.001, "change of the router's bias in each update", low=0.0, decides="training", needs=where(balance="bias")
    )
    z_loss: float = option(0.001, "weight of the router's z-loss (ST-MoE, eq. 5)", low=0.0, decides="training")


@dataclass(frozen=True)
class MoeFeedForwardConfig(GatedHidden, HiddenOptions):
    kind: str = option("moe", "sparse mixture of experts")
    moe: MoeConfig = group(MoeConfig(), "options of the mixture of experts")

    @property
    def activation(self) -> str:
        return self.moe.expert

    @property
    def memory_parts(self) -> dict[str, MemoryPart]:
        experts = {"": MemoryPart("experts/down")}
        return experts | ({"shared": MemoryPart("shared/down/kernel")} if self.moe.shared else {})

    @property
    def mixture(self) -> MoeConfig:
        return self.moe

    @property
    def bias_places(self) -> tuple[str, ...]:
        return ("router", "experts", "shared") if self.moe.shared else ("router", "experts")

    def with_biases(self, parts: set[str]) -> "MoeFeedForwardConfig":
        wanted = {"experts" if part == "shared" else part for part in parts} | {*self.moe.bias}
        return replace(self, moe=replace(self.moe, bias=tuple(name for name in BIASES if name in wanted)))

    @property
    def words(self) -> str:
        moe = self.moe
        each = f"{ACTIVATIONS[moe.expert].title} {self.hidden}"
        chosen = f"top-{moe.top_k} of {moe.experts} experts" if moe.routing == "token_choice" else f"{moe.experts} experts"
        named = ("experts", "top_k", "expert", "bias", "shared")
        shared = [f"{moe.shared} shared"] if moe.shared else []
        biases = [f"biases of the {' and '.join(moe.bias)}"] if moe.bias else []
        return ", ".join([f"{chosen} of {each}", *shared, *biases, *changed(moe, *named)])

    @property
    def random(self) -> bool:
        return self.moe.jitter > 0

    def resolved(self, place: Place, key: str) -> "MoeFeedForwardConfig":
        _check(self.moe, place, f"{key}.moe")
        gated = ACTIVATIONS[self.moe.expert].gated
        allowed = "'same' unless the experts are gated"
        require(gated or self.gated_hidden == "same", f"{key}.gated_hidden", self.gated_hidden, allowed)
        moe = replace(self.moe, bias=tuple(name for name in BIASES if name in self.moe.bias))
        return super(MoeFeedForwardConfig, replace(self, moe=moe)).resolved(place, key)


def _check(moe: MoeConfig, place: Place, key: str) -> None:
    require(set(moe.bias) <= set(BIASES), f"{key}.bias", moe.bias, f"names among {', '.join(BIASES)}")
    require(moe.top_k <= moe.experts, f"{key}.top_k", moe.top_k, f"at most moe.experts={moe.experts}")
    allowed = "at most 1 with expert='softmax': several shared experts would have one softmax"
    require(moe.shared <= 1 or moe.expert != "softmax", f"{key}.shared", moe.shared, allowed)
    if moe.routing == "token_choice":
        allowed = "at least 2 with renormalise=True: one gate would always be 1, and its gradient 0"
        require(moe.top_k > 1 or not moe.renormalise, f"{key}.top_k", moe.top_k, allowed)
        allowed = "at least 1 with a capacity: the capacity of an expert is proportional to it"
        require(not moe.capacity or place.max_length > 0, "model.max_length", place.max_length, allowed)
        return
    allowed = "'token_choice' with model.causal=True: the choice of an expert depends on later tokens"
    require(not place.causal, f"{key}.routing", moe.routing, allowed)
    condition = "with routing='expert_choice'"
    require(moe.capacity > 0, f"{key}.capacity", moe.capacity, f"above 0 {condition}")
    allowed = f"False {condition}: the experts of a token choose it independently"
    require(not moe.renormalise, f"{key}.renormalise", True, allowed)
    require(moe.balance == "none", f"{key}.balance", moe.balance, f"'none' {condition}, which is always balanced")


class MixtureOfExperts(SublayerModule):
    @staticmethod
    def longest_input(place: Place) -> int:
        """With a capacity, experts that have taken their tokens would do nothing for the rest of a longer sequence."""
        limited = place.options.moe.routing == "token_choice" and place.options.moe.capacity
        return place.max_length if limited else 0

    def __init__(self, place: Place, rngs):
        moe = self.config = place.options.moe
        self.slots = slots(moe, place.max_length)  # capacity with token choice; 0 for no limit
        into = Shape("D->E", place.input_width, moe.experts)
        self.router = Linear(place, into, rngs, bias="router" in moe.bias)
        self.experts = Experts(place, rngs)
        bias = jnp.zeros(moe.experts, place.param_dtype)
        self.router_bias = parameter(bias, "E") if moe.balance == "bias" else None
        self.shared = FeedForward(shared_place(place), rngs) if moe.shared else None

    @reads(HiddenOptions, GatedHidden)
    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the cache (with a capacity: how often each expert has been chosen), losses and statistics."""
        with jax.default_matmul_precision("highest"):  # by default, a float32 product rounds its factors on TPUs and GPUs
            logits_BLE = self.router(self._router_input(x_BLD, ctx), ctx)
        logits_BLE = ctx.tap("router_logits", logits_BLE)
        log_s = jax.nn.log_softmax if self.config.scores == "softmax" else jax.nn.log_sigmoid
        log_BLE = log_s(logits_BLE)
        if ctx.wants("router_probabilities"):
            p_BLE = jnp.exp(log_BLE)
            new_BLE = ctx.tap("router_probabilities", p_BLE)
            log_BLE = jnp.where(new_BLE == p_BLE, log_BLE, jnp.log(new_BLE))
        real_BL = jnp.ones(x_BLD.shape[:2], bool) if ctx.segments_BL is None else ctx.segments_BL > 0
        route = self._token_choice if self.config.routing == "token_choice" else self._expert_choice
        y_BLD, cache, statistics = route(x_BLD, log_BLE, real_BL, ctx, cache)
        if self.shared is not None:
            y_BLD += self.shared(x_BLD, ctx.at("shared"))[0]
        return y_BLD, cache, self._aux(logits_BLE, log_BLE, real_BL, statistics)

    def _router_input(self, x_BLD, ctx: Context):
        """x in float32 or wider, with the noise of Switch in training."""
        x_BLD = x_BLD.astype(wide_dtype(x_BLD))
        jitter = self.config.jitter
        if not jitter or ctx.key is None:
            return x_BLD
        return x_BLD * jax.random.uniform(ctx.dropout_key("jitter"), x_BLD.shape, x_BLD.dtype, 1 - jitter, 1 + jitter)

    def _token_choice(self, x_BLD, log_BLE, real_BL, ctx: Context, cache):
        B, L, _ = x_BLD.shape
        k, E = self.config.top_k, self.config.experts
        expert_BLk, margin_BL = self._highest(log_BLE)
        expert_BLk = ctx.tap("chosen", expert_BLk)
        log_BLk = jnp.take_along_axis(log_BLE, expert_BLk, -1)
        gates_BLk = jax.nn.softmax(log_BLk, -1) if self.config.renormalise else jnp.exp(log_BLk)
        chosen_BLE = jax.nn.one_hot(expert_BLk, E, dtype=jnp.int32).sum(2) * real_BL[..., None]
        statistics = {"router_load": chosen_BLE.sum(1), "router_margin": (margin_BL * real_BL).sum(1)}
        dropped_BLk = jnp.zeros((B, L, k), bool)
        if self.slots:
            rank_BLE = jnp.cumsum(chosen_BLE, 1) + (cache["counts"][:, None] if cache else 0)
            rank_BLk = jnp.take_along_axis(rank_BLE, expert_BLk, -1)
            dropped_BLk = ctx.tap("dropped", (rank_BLk > self.slots) & real_BL[..., None])
            kept_BLk = real_BL[..., None] & ~dropped_BLk
            gates_BLk = jnp.where(kept_BLk, gates_BLk, 0)
            cache = cache and {"counts": rank_BLE[:, -1]}
        statistics["router_drops"] = dropped_BLk.sum((1, 2), dtype=jnp.int32)
        gates_BLk = ctx.tap("gates", gates_BLk)
        # `by_slot` has no slot for a choice above the capacity, which a patch of `dropped` may keep.
        if self.slots and ctx.mesh is not None and cache is None and not ctx.wants("dropped", *TAPS):
            C = min(self.slots, L)
            slot_BLk = jnp.where(kept_BLk, C * expert_BLk + rank_BLk - 1, C * E)
            return by_slot(self.experts, x_BLD, slot_BLk, gates_BLk, C, ctx), cache, statistics
        return by_choice(self.experts, x_BLD, expert_BLk, gates_BLk, ctx), cache, statistics

    def _highest(self, log_BLE):
        """The k experts [B, L, k] with the highest s + b, and the margin [B, L] of the last over the next (0 if k = E).

        Without b it compares log s, which has the same order and does not saturate.
        """
        k = self.config.top_k
        bias = self.router_bias
        rank_by_BLE = log_BLE if bias is None else jnp.exp(log_BLE) + bias[...].astype(log_BLE.dtype)
        top, expert = jax.lax.top_k(jax.lax.stop_gradient(rank_by_BLE), min(k + 1, self.config.experts))
        top = jnp.exp(top) if bias is None else top
        return expert[..., :k], top[..., k - 1] - top[..., -1]

    def _expert_choice(self, x_BLD, log_BLE, real_BL, ctx: Context, cache):
        C = slots(self.config, x_BLD.shape[1])
        log_BEL = jnp.where(real_BL[..., None], log_BLE, -jnp.inf).swapaxes(1, 2)
        log_BEC, at_BEC = jax.lax.top_k(log_BEL, C)
        at_BEC = ctx.tap("chosen", at_BEC)
        log_BEC = jnp.take_along_axis(log_BEL, at_BEC, -1) if ctx.changes("chosen") else log_BEC
        gates_BEC = ctx.tap("gates", jnp.exp(log_BEC))
        y_BLD = by_expert(self.experts, x_BLD, at_BEC, gates_BEC, ctx)
        return y_BLD, cache, {"router_load": (log_BEC > -jnp.inf).sum(-1, dtype=jnp.int32)}

    def _aux(self, logits_BLE, log_BLE, real_BL, statistics: dict) -> Aux:
        """Losses and statistics. These are sums over the tokens of a sequence without padding: choices and probability
        of each expert [B, E], entropy of the router's distribution, margin of the last choice over the next, and
        dropped choices [B]."""
        moe = self.config
        log_p = jax.nn.log_softmax(log_BLE, -1)
        p_BLE = jnp.exp(log_p) * real_BL[..., None]
        mass_BE = p_BLE.sum(1)
        load_BE = statistics["router_load"]
        z_BL = jnp.square(jax.nn.logsumexp(logits_BLE, -1)) * real_BL
        losses = {"router_z_loss": moe.z_loss * z_BL.sum(-1)}
        if moe.balance == "loss":
            choices_B1 = jnp.maximum(moe.top_k * real_BL.sum(-1, keepdims=True), 1)
            share_BE = load_BE.astype(mass_BE.dtype) / choices_B1
            losses["balance_loss"] = moe.balance_loss * moe.experts * (share_BE * mass_BE).sum(-1)
        statistics |= {"router_mass": mass_BE, "router_entropy": -(p_BLE * log_p).sum((1, 2))}
        return Aux(losses, jax.lax.stop_gradient(statistics))

    def init_cache(self, batch: int, length: int) -> dict:
        """With a capacity: how often each of `batch` sequences has chosen each expert."""
        return {"counts": jnp.zeros((batch, self.config.experts), jnp.int32)} if self.slots else {}

    def memories(self, dtype) -> dict[str, Memory]:
        """One memory for all experts, and one for the shared experts."""
        experts = {"": self.experts.memory(dtype)}
        return experts | ({"shared": self.shared.memories(dtype)[""]} if self.shared is not None else {})

    @staticmethod
    def costs(place: Place, length: int) -> Costs:
        moe = place.options.moe
        used = Fraction(moe.top_k)
        if moe.routing == "expert_choice":
            used = Fraction(moe.experts * slots(moe, length), length)
        total = Shape("D->E", place.input_width, moe.experts).costs("router" in moe.bias) + Experts.costs(place, used)
        total += weights(moe.experts if moe.balance == "bias" else 0)
        return total + (FeedForward.costs(shared_place(place), length) if moe.shared else Costs())

    @staticmethod
    def traffic(place: Place) -> Traffic:
        return Traffic(routed=place.options.moe.top_k * place.input_width)

    @staticmethod
    def kernel(place: Place, length: int, rows: Rows, execution, mesh) -> KernelChoice[str]:
        moe = place.options.moe
        requested = execution.expert_kernel
        if moe.routing == "expert_choice" or moe.capacity and mesh is not None:
            reason = "every expert has the same number of slots"
            allowed = f"'auto' here: {reason}, so their products are batched"
            require(requested == "auto", "training.expert_kernel", requested, allowed)
            return KernelChoice("batched", reason)
        return choose_grouped_matmul(Call(platform(mesh), place.dtype), requested)

    @staticmethod
    def after_update(params: dict, options: SublayerConfig, statistics: dict) -> dict:
        """The update of the router's bias: b += speed sign(mean load - load) (DeepSeek-V3, sec. 2.1.2)."""
        moe = options.mixture
        if moe.balance != "bias":
            return params
        bias_RE = params["router_bias"]
        step_RE = moe.bias_speed * below_mean(statistics["router_load"]).astype(bias_RE.dtype)
        return params | {"router_bias": bias_RE + step_RE}


def below_mean(load_RE):
    """sign(mean load - load), exact and without overflow: if the total is q E + r, q is below the mean if r > 0."""
    q_R1, r_R1 = jnp.divmod(load_RE.sum(-1, keepdims=True), load_RE.shape[-1])
    return jnp.where(load_RE == q_R1, r_R1 > 0, jnp.sign(q_R1 - load_RE))
