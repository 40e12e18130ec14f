"""Rules of a text (sampling.Rules): they change the scores of its next token by the tokens before it, as `transformers`.

tokens_BS: the tokens of each row, -1 in the place of padding and of tokens to come. The next token is in column `index`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from xfresearch.models.sampling import Rules


def tokens_of(tokens_BP: jax.Array, segments_BP: jax.Array, length: int) -> jax.Array:
    """tokens_BS with room for `length` tokens, of prompts that are padded on the left, where segments are 0."""
    tokens_BP = jnp.where(segments_BP > 0, tokens_BP, -1)
    return jnp.pad(tokens_BP, ((0, 0), (0, length - tokens_BP.shape[1])), constant_values=-1)


def ruled(scores_BV: jax.Array, rules: Rules, stops: tuple[int, ...], tokens_BS: jax.Array, index: jax.Array) -> jax.Array:
    """The scores, logits or log p, after the rules: -inf for a token that they forbid."""
    V = scores_BV.shape[1]
    if rules.repetition_penalty != 1:
        p = rules.repetition_penalty
        before_BV = _among(tokens_BS, tokens_BS >= 0, V)
        scores_BV = jnp.where(before_BV, jnp.where(scores_BV < 0, scores_BV * p, scores_BV / p), scores_BV)
    forbidden = []
    if 0 < rules.no_repeat_ngram_size <= tokens_BS.shape[1]:
        forbidden.append(_repeats(rules.no_repeat_ngram_size, tokens_BS, index, V))
    words = [word for word in rules.bad_words_ids if not (len(word) == 1 and word[0] in stops)]
    for size in sorted({len(word) for word in words if len(word) <= tokens_BS.shape[1]}):
        forbidden.append(_ends([word for word in words if len(word) == size], tokens_BS, index, V))
    if rules.min_length and stops:
        short_B1 = (tokens_BS >= 0).sum(1, keepdims=True) < rules.min_length
        forbidden.append(short_B1 & jnp.isin(jnp.arange(V), jnp.array(stops)))
    for forbidden_BV in forbidden:
        scores_BV = jnp.where(forbidden_BV, -jnp.inf, scores_BV)
    return scores_BV


def _repeats(n: int, tokens_BS: jax.Array, index: jax.Array, V: int) -> jax.Array:
    """Which tokens [B, V] followed the last n - 1 before. After a text of fewer tokens, they have -1, which none follows."""
    last_BN = _last(n - 1, tokens_BS, index)
    same_BW = jnp.ones((len(tokens_BS), tokens_BS.shape[1] - n + 1), bool)
    for place in range(n - 1):
        same_BW &= tokens_BS[:, place : place + same_BW.shape[1]] == last_BN[:, place, None]
    return _among(tokens_BS[:, n - 1 :], same_BW, V)


def _ends(words: list, tokens_BS: jax.Array, index: jax.Array, V: int) -> jax.Array:
    """Which tokens [B, V] end one of the words, which have equally many tokens, after the last tokens."""
    words_WN = jnp.array(words)
    last_BN = _last(words_WN.shape[1] - 1, tokens_BS, index)
    begun_BW = (last_BN[:, None] == words_WN[:, :-1]).all(-1)
    return _among(jnp.broadcast_to(words_WN[:, -1], begun_BW.shape), begun_BW, V)


def _last(count: int, tokens_BS: jax.Array, index: jax.Array) -> jax.Array:
    """The last `count` tokens before the next one. Of a text of fewer columns, they are tokens that no rule has."""
    return lax.dynamic_slice_in_dim(tokens_BS, index - count, count, 1)


def _among(ids_BN: jax.Array, counts_BN: jax.Array, V: int) -> jax.Array:
    """Whether each id [B, V] is one of ids_BN that count."""
    rows_B1 = jnp.arange(len(ids_BN))[:, None]
    ids_BN = jnp.where(counts_BN & (ids_BN >= 0), ids_BN, V)  # V is in no column, and is dropped
    return jnp.zeros((len(ids_BN), V), bool).at[rows_B1, ids_BN].set(True, mode="drop")
