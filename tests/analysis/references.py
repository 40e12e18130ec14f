"""What tests of analyses share: the recorded values of a model in float64, and entropies.

The definitions of the figures are in tests/reference/figures.py.
"""

import numpy as np


def recorded(lm, tokens_NL, sites=("",)) -> dict[str, np.ndarray]:
    """The values of a forward pass whose names end in one of `sites`, in float64."""
    names = [name for name in lm.tap_names() if name.endswith(tuple(sites))]
    return {name: np.asarray(value, np.float64) for name, value in lm.capture(tokens_NL, names).items()}


def parameter(lm, path: str) -> np.ndarray | None:
    """lm.params['a']['b'] of 'a/b' in float64; None if it does not exist."""
    found = lm.params
    for name in path.split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return None if found is None else np.asarray(found, np.float64)


def information(a, b) -> float:
    """Mutual information of paired values in bits: H(a) + H(b) - H(a, b)."""
    return entropy(list(a)) + entropy(list(b)) - entropy(list(zip(a, b, strict=True)))


def entropy(values: list) -> float:
    shares = np.array([values.count(value) for value in set(values)]) / len(values)
    return float(-(shares * np.log2(shares)).sum())
