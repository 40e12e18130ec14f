"""What else is measured on every run of a study: abilities that separate arms whose losses are equal. More is better.

    copying     nats saved on the second half of random tokens that are repeated once (Olsson et al. 2022), per token
    recall      nats saved on the value of a key that has occurred before, among PAIRS pairs of random keys and values in
                random order (associative recall, Arora et al. 2023)
    induction   largest induction score of any head (analysis/attention.py); NaN without softmax attention over tokens
    sink        mean weight of the heads on the first token of held-out text; NaN likewise

The tokens of copying and recall are the same for all runs with one vocabulary.
"""

from collections.abc import Callable, Sequence

import numpy as np

from xfresearch.errors import require

ROWS, PAIRS = 64, 8
LONGEST = 64  # tokens that are copied


def copying(lm) -> float:
    half = min(LONGEST, lm.run.sequence_length // 2)
    once_BL = np.random.default_rng(0).integers(lm.config.vocab_size, size=(ROWS, half))
    loss_BL = np.asarray(lm.loss(np.concatenate([once_BL, once_BL], 1)), np.float64)
    return float(loss_BL[:, : half - 1].mean() - loss_BL[:, half:].mean())  # not the first token of the copy


def recall(lm) -> float:
    pairs = min(PAIRS, lm.run.sequence_length // 4, lm.config.vocab_size // 2)
    tokens_BL = pairs_twice(np.random.default_rng(0), ROWS, pairs, lm.config.vocab_size)
    loss_BL = np.asarray(lm.loss(tokens_BL), np.float64)[:, ::2]  # of the values: position 2 i predicts that of pair i
    return float(loss_BL[:, :pairs].mean() - loss_BL[:, pairs:].mean())


def pairs_twice(rng, rows: int, pairs: int, vocabulary: int) -> np.ndarray:
    """[rows, 4 pairs]: key, value, key, value, ..., then the same pairs in another order. No token is in two pairs."""
    found = []
    for _ in range(rows):
        first_P2 = rng.permutation(vocabulary)[: 2 * pairs].reshape(pairs, 2)
        found.append(np.concatenate([first_P2, rng.permutation(first_P2)]).ravel())
    return np.stack(found)


def induction(lm) -> float:
    return _of_attention(lm, "induction", np.nanmax)


def sink(lm) -> float:
    return _of_attention(lm, "first", np.nanmean)


def _of_attention(lm, name: str, over_heads: Callable) -> float:
    from xfresearch.analysis.attention import applies, attention

    return np.nan if applies(lm.config) else float(over_heads(attention(lm, count=8).data[name]))


PROBES: dict[str, Callable] = {"copying": copying, "recall": recall, "induction": induction, "sink": sink}


def check(names: Sequence[str]) -> None:
    """Raises UserError for a probe that does not exist."""
    for name in names:
        require(name in PROBES, "probes", name, f"one of {', '.join(PROBES)}")


def measure(lm, names: Sequence[str]) -> dict[str, float]:
    """{name: value} of a language model."""
    return {name: PROBES[name](lm) for name in names}
