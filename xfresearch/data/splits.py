"""The splits of data that are drawn from a seed: the first 80 % of them train, the others validate."""

SPLITS = ("train", "validation")
TRAIN_SHARE = 0.8


def rows_of(split: str, groups: int, size: int = 1) -> slice:
    """The rows of a split of `groups` groups of `size` adjacent rows, at least two groups. A group is in one split, and each
    split has at least one."""
    cut = min(max(round(TRAIN_SHARE * groups), 1), groups - 1) * size
    return slice(cut) if split == "train" else slice(cut, None)
