"""All tolerances of the tests: relative, per dtype, and never loosened to make a test pass."""

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}


def median_error(actual, expected) -> float:
    """The median over tokens of the norm of a token's difference, relative to that of its expected values [..., V]."""
    import numpy as np

    expected = np.asarray(expected, np.float64)
    off = np.linalg.norm(np.asarray(actual, np.float64) - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(np.median(off))


def relative_error(actual, expected) -> float:
    """The largest absolute difference divided by the largest absolute expected value."""
    import numpy as np

    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"shapes differ: {actual.shape} and {expected.shape}"
    return float(np.max(np.abs(actual - expected), initial=0.0) / (np.max(np.abs(expected), initial=0.0) + 1e-300))
