"""Activations of taps as vectors of tokens, streamed: those of one pass are in memory at a time."""

import math

import jax.numpy as jnp
import numpy as np

from xfresearch.analysis.sequences import Sequences, batches
from xfresearch.models.inputs import matching, tap_shapes
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.taps import of_encoder
from xfresearch.runtime.errors import UserError

BATCH = 8  # rows


def one_tap(model: ModelConfig, argument: str, name: str, length: int) -> str:
    """The tap that `name` means. Raises UserError if there is none, if there are several, or if its value in a pass over
    `length` tokens is not a vector of each token."""
    taps = [tap for tap, _ in matching(model, [name]).values()]
    if len(taps) != 1:
        allowed = f"it must match one tap, as {taps[0]!r} does, and matches {len(taps)}"
        raise UserError(f"{argument}={name!r} is not allowed: {allowed}")
    of_one, of_all = (tap_shapes(model, 1, tokens, tokens)[taps[0]] for tokens in (1, length))
    # A dimension that counts tokens differs between the two, so that heads and experts are not taken for tokens.
    of_tokens = of_one.shape[:2] == (1, 1) and of_all.shape == (1, length, *of_one.shape[2:])
    if not of_tokens or len(of_all.shape) < 3 or not jnp.issubdtype(of_all.dtype, jnp.floating):
        shape = f"{of_all.dtype} {list(of_all.shape)} for {length} tokens"
        raise UserError(f"{argument}={name!r} is not allowed: it must be a vector of each token, and is {shape}")
    return taps[0]


def width_of(model: ModelConfig, tap: str) -> int:
    """The size of the value of a token, with all its dimensions."""
    return math.prod(tap_shapes(model)[tap].shape[2:])


def activations(lm, rows: Sequences, taps: tuple[str, ...]) -> list:
    """The values [T, D] of the taps, with all dimensions after those of the tokens in one; of padding too."""
    values = lm.capture(names=tuple(dict.fromkeys(taps)), **rows.inputs.arguments())
    return [values[tap].reshape(stack_of(rows, tap).inputs.tokens_NL.size, -1) for tap in taps]


def stack_of(rows: Sequences, tap: str) -> Sequences:
    """The rows that the stack of a tap, or of a memory, reads."""
    return rows.of_source if of_encoder(tap) else rows


class Shuffled:
    """Batches of activations of the tokens of rows that are no padding, in a random order that differs between epochs.

    Tokens of one row are alike, so `together` batches of `batch` tokens come from one pass, which mixes the tokens of its
    rows. Both are smaller if there are fewer tokens."""

    def __init__(self, lm, rows: Sequences, taps: tuple[str, ...], batch: int, together: int, seed: int):
        self.lm, self.rows, self.taps, self.seed = lm, rows, taps, seed
        self.real_NL = np.asarray(stack_of(rows, taps[0]).inputs.real_NL)
        total = int(self.real_NL.sum())
        self.batch = min(batch, total)
        self.together = min(together, total // self.batch)

    def read(self, number: int) -> list:
        """The values [together, batch, D] of the taps in pass `number`."""
        chosen = self._rows(number)
        parts = [activations(self.lm, some, self.taps) for some, _ in batches(self.rows.chosen(np.array(chosen)), BATCH)]
        real_T = np.flatnonzero(self.real_NL[chosen])
        order_T = np.random.default_rng([self.seed, 1, number]).permutation(len(real_T))
        order_CT = real_T[np.resize(order_T, self.together * self.batch)].reshape(self.together, self.batch)
        return [jnp.concatenate(values)[order_CT] for values in zip(*parts, strict=True)]

    def _rows(self, number: int) -> list[int]:
        """The rows of a pass. All rows are read once before the next epoch begins."""
        total = len(self.real_NL)
        count = -(-self.together * self.batch * total // int(self.real_NL.sum()))
        positions = [divmod(position, total) for position in range(number * count, (number + 1) * count)]
        orders = {e: np.random.default_rng([self.seed, 0, e]).permutation(total) for e in {e for e, _ in positions}}
        return [int(orders[epoch][position]) for epoch, position in positions]
