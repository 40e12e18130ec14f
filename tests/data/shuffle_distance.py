"""python -m tests.data.shuffle_distance

How far the order of a large corpus is from a full permutation of its rows: the mean distance of two rows of one shard, as a
share of an epoch, and the number of shards in a batch of 64 rows.
"""

import numpy as np

from xfresearch.data.order import Order

ROWS, BATCH = 500, 64  # of a shard, and rows of a batch


class Equal:
    """Shards with equally many rows."""

    def __init__(self, parts: int):
        self.parts = parts

    def rows_of(self, parts):
        return [ROWS] * len(parts)


def figures(shard_N: np.ndarray) -> tuple[float, float]:
    """By the shard of each row in the order in which an epoch reads them."""
    rng = np.random.default_rng(0)
    places = np.argsort(shard_N, kind="stable").reshape(-1, ROWS)
    two = rng.permuted(places, axis=1)[:, :200].reshape(len(places), 2, 100)
    batches = shard_N[: len(shard_N) // BATCH * BATCH].reshape(-1, BATCH)
    distance = np.abs(two[:, 0] - two[:, 1]).mean() / len(shard_N)
    return float(distance), float(np.mean([len(np.unique(batch)) for batch in batches]))


def main() -> None:
    for shards in (8, 16, 64, 800):
        order = Order(Equal(shards), 0)
        read = np.array([order[place][0] for place in range(shards * ROWS)])
        drawn = np.random.default_rng(1).permutation(read)
        (near, few), (far, many) = figures(read), figures(drawn)
        full = f"(full permutation: {far:.3f}, {many:.1f})"
        print(f"{shards} shards: distance {near:.3f}, {few:.1f} shards in a batch {full}")


if __name__ == "__main__":
    main()
