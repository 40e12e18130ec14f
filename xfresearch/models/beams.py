"""Beam search: keeps the `beams` best continuations of a prompt at each step, and returns the best one by its score

    score = (sum of log p of the tokens, the stop included) / (number of tokens)^length_penalty

as `transformers` computes it (Wu et al. 2016, eq. 14, have another penalty). A prompt is done when `beams` continuations
have ended and, by `early_stopping`,

    False    no other one has a better score at its present length
    "never"  no other one can get a better score: with a length penalty above 0, at the greatest length
    True     at once

Rows of the decoding state are beams: a step gathers the beams that go on, with their caches, and the host keeps the texts.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.models import transformer
from xfresearch.models.context import Source
from xfresearch.models.decoding import advance, for_steps, pad_left, prefill, round_up, row_keys
from xfresearch.models.forced import NONE, Forced, forced_in
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.rules import ruled
from xfresearch.models.sampling import Beams
from xfresearch.runtime.errors import UserError


class Ended(NamedTuple):
    """A continuation without the token that ended it."""

    tokens: list[int]
    score: float


def search(
    model: ModelConfig,
    params: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    how: Beams,
    stops: tuple[int, ...] = (),
    vocab_size: int = 0,
    source: Source | None = None,
    forced: Forced = NONE,
    prefix: bool = False,
) -> list[Ended]:
    """The best continuation of every prompt. The arguments are those of `decoding.generate`; `forced` are tokens that a text
    begins and ends with (forced.py)."""
    K = how.beams
    first, last = forced_in(forced, prompts, max_new_tokens)
    if len(first) == max_new_tokens:
        return [Ended(first, 0.0) for _ in prompts]
    rows = [[*prompt, *first] for prompt in prompts for _ in range(K)]
    tokens_BP, segments_BP = pad_left(rows)
    length = round_up(tokens_BP.shape[1] + max_new_tokens, 64)
    of_rows = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), K, 0), source)
    params = for_steps(model, params)
    state = prefill(model, length, params, tokens_BP, segments_BP, row_keys(rows, 0), source=of_rows, prefix=prefix)
    searches = [_Search(how, stops, first, max_new_tokens) for _ in prompts]
    count = min(vocab_size or model.vocab_size, state["logits"].shape[-1])
    for left in reversed(range(max_new_tokens - len(first))):
        scores_B = np.concatenate([each.scores_K for each in searches])
        if left or last is None:
            found = jax.device_get(jax.block_until_ready(_candidates(how, stops, count, state, scores_B)))
        else:  # its probability is 1
            found = scores_B.reshape(-1, K), np.tile(np.arange(K), (len(prompts), 1)), np.full((len(prompts), K), last)
        if np.isnan(found[0]).any():
            raise UserError("the model computes log-probabilities that are NaN: did its training diverge?")
        for each, *of_prompt in zip(searches, *found, strict=True):
            each.go_on(*of_prompt, last=left == 0)
        if not left or all(each.done for each in searches):
            break
        from_B = np.concatenate([K * number + each.from_K for number, each in enumerate(searches)])
        tokens_B = np.concatenate([[text[-1] for text in each.texts] for each in searches])
        state = _advanced(model, params, state, from_B, tokens_B)
    return [each.ended[0] for each in searches]


class _Search:
    """The search for one prompt.

    scores_K: sums of log p of the beams that go on; -inf for a beam that does not exist. from_K: the previous beams that
    they continue. texts: the tokens of the beams. ended: the best continuations that have ended, best first.
    """

    def __init__(self, how: Beams, stops: tuple[int, ...], first: list[int], longest: int):
        self.how, self.stops, self.longest = how, stops, longest
        self.scores_K = np.array([0.0] + [-np.inf] * (how.beams - 1), np.float32)
        self.from_K = np.arange(how.beams)
        self.texts = [first] * how.beams
        self.ended: list[Ended] = []
        self.done = False

    def go_on(self, values_C, beams_C, tokens_C, last: bool) -> None:
        """Takes the next token of each beam from the best candidates. After the `last` token all beams end."""
        K = self.how.beams
        if self.done:
            self.from_K = np.arange(K)
            return
        going: list[tuple[float, int, list[int]]] = []
        for rank, (value, beam, token) in enumerate(zip(values_C, beams_C.tolist(), tokens_C.tolist(), strict=True)):
            text, stop = [*self.texts[beam], token], token in self.stops
            if stop or last:  # of what ends, only the first K candidates count
                if rank < K and value > -np.inf:
                    self.ended.append(Ended(text[:-1] if stop else text, self._score(value, len(text))))
            elif len(going) < K:
                going.append((value, beam, text))
        self.ended = sorted(self.ended, key=lambda each: -each.score)[:K]
        if last:
            self.ended = self.ended or [Ended(self.texts[0], -np.inf)]  # the rules forbid every token
            self.done = True
            return
        going += [(-np.inf, 0, [*self.texts[0], 0])] * (K - len(going))  # of a vocabulary smaller than the beams
        values, beams, self.texts = map(list, zip(*going, strict=True))
        self.scores_K, self.from_K = np.array(values, np.float32), np.array(beams)
        self.done = len(self.ended) == K and (self.how.early_stopping is True or not self._can_improve(values[0]))

    def _can_improve(self, value: float) -> bool:
        """Whether the best text that goes on, with the sum `value`, has or can get a better score than one that ended."""
        at_end = self.how.early_stopping == "never" and self.how.length_penalty > 0
        return self._score(value, self.longest if at_end else len(self.texts[0])) > self.ended[-1].score

    def _score(self, value: float, length: int) -> float:
        return float(value) / length**self.how.length_penalty


@partial(jax.jit, static_argnums=(0, 1, 2))
def _candidates(how: Beams, stops: tuple[int, ...], vocab_size: int, state: dict[str, Any], scores_B: jax.Array) -> tuple:
    """Sums of log p, beams and tokens [prompts, C] of the C best continuations of each prompt. C is so large that at least K
    of them do not end in a stop. As in `transformers`, p does not sum to 1 again after the rules."""
    K = how.beams
    log_p_BV = jax.nn.log_softmax(state["logits"][:, :vocab_size], -1)
    log_p_BV = ruled(log_p_BV, how.rules, stops, state["tokens"], state["index"]) + scores_B[:, None]
    log_p_PX = log_p_BV.reshape(-1, K * vocab_size)
    values_PC, choices_PC = jax.lax.top_k(log_p_PX, min((1 + max(len(stops), 1)) * K, K * vocab_size))
    return values_PC, choices_PC // vocab_size, choices_PC % vocab_size


@partial(jax.jit, static_argnums=0)
def _advanced(model: ModelConfig, params: dict[str, Any], state: dict[str, Any], from_B, tokens_B) -> dict[str, Any]:
    """The state after each row goes on from a row of the same prompt, with one more token."""
    state = state | {"caches": {name: _gathered(cache, from_B) for name, cache in state["caches"].items()}}
    state |= {"tokens": state["tokens"][from_B]}
    return advance(transformer.bind(model, params), state, jnp.asarray(tokens_B, jnp.int32), ())


def _gathered(cache: Any, from_B: jax.Array) -> Any:
    """The rows `from_B` of the caches of a stack, whose layers may be apart. Slots have no rows, and a single row stays."""
    rows = 0 if isinstance(cache, list) else 1

    def gathered(path: Any, leaf: jax.Array) -> jax.Array:
        slots = any(getattr(key, "key", "") == "memory" for key in path)
        return leaf if slots or len(from_B) == 1 else jnp.take(leaf, from_B, rows)

    return jax.tree_util.tree_map_with_path(gathered, cache)
