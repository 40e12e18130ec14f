"""The rules of a text in plain Python, from their definitions (`transformers`, generation/logits_process.py)."""

import numpy as np


def after_rules(scores_V, text: list[int], rules, stops=()) -> np.ndarray:
    """The scores of the token after `text`, the prompt included."""
    scores_V = np.array(scores_V, np.float64)
    for token in set(text):
        score = scores_V[token]
        scores_V[token] = score * rules.repetition_penalty if score < 0 else score / rules.repetition_penalty
    n = rules.no_repeat_ngram_size
    if n:
        seen = {tuple(text[first : first + n]) for first in range(len(text) - n + 1)}
        end = text[len(text) - n + 1 :]
        scores_V[[token for token in range(len(scores_V)) if (*end, token) in seen]] = -np.inf
    for *begin, last in rules.bad_words_ids:
        if text[len(text) - len(begin) :] == begin and (begin or last not in stops):
            scores_V[last] = -np.inf
    if len(text) < rules.min_length:
        scores_V[list(stops)] = -np.inf
    return scores_V
