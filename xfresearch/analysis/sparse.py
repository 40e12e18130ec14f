"""A sparse dictionary of activations: a sparse autoencoder, or a transcoder if it predicts another activation.

    f = jump(x W_enc + b_enc)        jump(z) = z where z > threshold, else 0
    y' = f W_dec + b_dec             rows of W_dec have norm 1

Training is BatchTopK (Bussmann et al. 2024): of a batch of T tokens the k T largest positive coefficients stay, instead of
those above a threshold. The threshold is the mean, over about the last 100 batches, of the smallest coefficient that stayed.
The loss is

    mean (y - y')^2 + 1/32 mean (e - e')^2        e = y - y', a constant in the second term

where e' is made of the dead features alone, those that no token of the last DEAD batches used, of which the E/2 T largest
coefficients count (AuxK of Gao et al. 2024, who take them from each token). x and y are shifted and scaled to mean 0 and
mean norm sqrt(width); `folded` puts that into the weights. Letters: D width of x, E width of y, F features, T tokens.
"""

import json
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from xfresearch.analysis.passes import wide

AUXILIARY = 1 / 32  # the coefficient of the dead features' loss
DEAD = 20  # batches without use
RATE = 0.08  # of Adam, over sqrt(D)
LAST = 0.2  # the share of the steps in which the rate falls to 0
MEMORY = 100  # batches in the mean threshold
FORMAT = "6.0.0"  # the version of SAELens whose format `files` writes
PARTS = {"encoder_DF": "W_enc", "encoder_bias_F": "b_enc", "decoder_FE": "W_dec", "decoder_bias_E": "b_dec"}
PARTS |= {"threshold_F": "threshold"}  # SAELens' names


class Dictionary(NamedTuple):
    """The arrays of a trained dictionary; they read and write unscaled activations."""

    encoder_DF: jax.Array
    encoder_bias_F: jax.Array
    decoder_FE: jax.Array
    decoder_bias_E: jax.Array
    threshold_F: jax.Array


class Scale(NamedTuple):
    """A map of activations to mean 0 and mean norm sqrt(width), in float32: training is, also that of a float64 model."""

    mean: jax.Array
    factor: jax.Array

    def __call__(self, x):
        return ((wide(x) - self.mean) * self.factor).astype(jnp.float32)


@jax.jit
def scale_of(x) -> Scale:
    """The scale of activations [..., D]."""
    x_TD = wide(x).reshape(-1, x.shape[-1])
    mean_D = x_TD.mean(0)
    norm = jnp.linalg.norm(x_TD - mean_D, axis=-1).mean()
    return Scale(mean_D, jnp.where(norm > 0, jnp.sqrt(jnp.float32(x_TD.shape[1])) / norm, 1.0))


def encode(dictionary: Dictionary, x):
    """The coefficients [..., F] of activations [..., D]."""
    z = wide(x) @ dictionary.encoder_DF + dictionary.encoder_bias_F
    return jnp.where(z > dictionary.threshold_F, jax.nn.relu(z), 0.0)


def decode(dictionary: Dictionary, f):
    """The activations [..., E] of coefficients [..., F]."""
    return f @ dictionary.decoder_FE + dictionary.decoder_bias_E


@partial(jax.jit, static_argnums=(1, 2, 3))
def start(seed: int, width: int, size: int, target_width: int = 0) -> dict:
    """The state before the first step. The decoder's rows are random directions. An autoencoder's encoder (target_width 0)
    is its transpose; that of a transcoder has other directions."""
    keys = jax.random.split(jax.random.key(seed), 2)
    decoder_FE = _unit(jax.random.normal(keys[0], (size, target_width or width), jnp.float32))
    encoder_FD = _unit(jax.random.normal(keys[1], (size, width), jnp.float32)) if target_width else decoder_FE
    weights = {"encoder_DF": encoder_FD.T, "encoder_bias_F": jnp.zeros(size, jnp.float32)}
    weights |= {"decoder_FE": decoder_FE, "decoder_bias_E": jnp.zeros(target_width or width, jnp.float32)}
    counts = {"step": jnp.zeros((), jnp.int32), "silent_F": jnp.zeros(size, jnp.int32)}
    state = {"weights": weights, "adam": optax.scale_by_adam().init(weights), "threshold": jnp.zeros((), jnp.float32)}
    return state | counts


@partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def train(state: dict, x_CTD, y_CTE, k: int, steps: int) -> dict:
    """The state after C more batches of scaled activations, of `steps` in all."""
    return jax.lax.scan(lambda state, batch: (_step(state, *batch, k, steps), None), state, (x_CTD, y_CTE))[0]


def _step(state: dict, x_TD, y_TE, k: int, steps: int) -> dict:
    weights, dead_F = state["weights"], state["silent_F"] >= DEAD
    slopes, (f_TF, lowest) = jax.grad(loss, has_aux=True)(weights, x_TD, y_TE, k, dead_F)
    # The part of a decoder row's gradient along the row would only change its norm, which stays 1.
    row_FE = weights["decoder_FE"]
    slopes["decoder_FE"] -= (slopes["decoder_FE"] * row_FE).sum(-1, keepdims=True) * row_FE
    updates, adam = optax.scale_by_adam().update(slopes, state["adam"])
    left = (steps - state["step"]).astype(jnp.float32) / (LAST * steps)
    rate = RATE / x_TD.shape[1] ** 0.5 * jnp.clip(left, 0.0, 1.0)
    weights = jax.tree.map(lambda w, update: w - rate * update, weights, updates)
    weights["decoder_FE"] = _unit(weights["decoder_FE"])
    step = state["step"] + 1
    threshold = state["threshold"] + (lowest - state["threshold"]) / jnp.minimum(step, MEMORY)
    silent_F = jnp.where((f_TF > 0).any(0), 0, state["silent_F"] + 1)
    return {"weights": weights, "adam": adam, "threshold": threshold, "step": step, "silent_F": silent_F}


def loss(weights: dict, x_TD, y_TE, k: int, dead_F):
    """(loss, (coefficients [T, F], the smallest one that stayed))."""
    z_TF = jax.nn.relu(x_TD @ weights["encoder_DF"] + weights["encoder_bias_F"])
    f_TF, lowest = largest(z_TF, k * len(x_TD))
    error_TE = y_TE - f_TF @ weights["decoder_FE"] - weights["decoder_bias_E"]

    def of_dead():
        dead_TF, _ = largest(jnp.where(dead_F, z_TF, 0.0), max(y_TE.shape[1] // 2, 1) * len(x_TD))
        return jnp.square(jax.lax.stop_gradient(error_TE) - dead_TF @ weights["decoder_FE"]).mean()

    auxiliary = jax.lax.cond(dead_F.any(), of_dead, lambda: jnp.zeros((), error_TE.dtype))
    return jnp.square(error_TE).mean() + AUXILIARY * auxiliary, (f_TF, lowest)


def largest(z_TF, count: int):
    """(z with zeros instead of all but the `count` largest values, the smallest of these). z >= 0; equal values stay
    together. If fewer are positive, the smallest is 0.

    The bits of positive floats have the order of the floats, so the value is found bit by bit: 31 counts instead of a sort,
    which takes ten times as long on a CPU."""
    bits_TF = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(z_TF), jnp.int32)

    def bit(number, threshold):
        higher = threshold | (1 << (30 - number))
        return jnp.where((bits_TF >= higher).sum() >= count, higher, threshold)

    threshold = jax.lax.fori_loop(0, 31, bit, jnp.int32(0))
    return jnp.where(bits_TF >= threshold, z_TF, 0.0), jax.lax.bitcast_convert_type(threshold, jnp.float32)


@jax.jit
def folded(state: dict, scale_in: Scale, scale_out: Scale) -> Dictionary:
    """The dictionary of a trained state, for unscaled activations. Its coefficients are in units of y."""
    w = state["weights"]
    encoder_DF = w["encoder_DF"] * (scale_in.factor / scale_out.factor)
    bias_F = w["encoder_bias_F"] / scale_out.factor - scale_in.mean @ encoder_DF
    threshold_F = jnp.full_like(bias_F, state["threshold"] / scale_out.factor)
    bias_E = w["decoder_bias_E"] / scale_out.factor + scale_out.mean
    return Dictionary(encoder_DF, bias_F, w["decoder_FE"], bias_E, threshold_F)


def files(dictionary: Dictionary, tap: str, target: str, about: dict) -> dict[str, bytes]:
    """{name: content} of a folder that SAELens reads with SAE.load_from_disk. `about` is more metadata."""
    from safetensors.numpy import save

    width, size = dictionary.encoder_DF.shape
    config = {"architecture": "jumprelu", "d_in": width, "d_sae": size, "dtype": "float32", "device": "cpu"}
    config |= {"apply_b_dec_to_input": False, "normalize_activations": "none", "reshape_activations": "none"}
    metadata = {"sae_lens_version": FORMAT, "hook_name": tap} | about
    if target == tap and tap.endswith("hook_z"):
        config["reshape_activations"] = "hook_z"  # SAELens joins the heads' outputs itself
    if target != tap:
        config |= {"architecture": "jumprelu_transcoder", "d_out": dictionary.decoder_FE.shape[1]}
        metadata |= {"hook_name_out": target}
    arrays = {theirs: np.ascontiguousarray(getattr(dictionary, ours)) for ours, theirs in PARTS.items()}
    text = json.dumps(config | {"metadata": metadata}, indent=2) + "\n"
    return {"cfg.json": text.encode(), "sae_weights.safetensors": save(arrays)}


def _unit(x_FE):
    return x_FE / jnp.linalg.norm(x_FE, axis=-1, keepdims=True)
