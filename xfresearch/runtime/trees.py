"""Paths of the leaves of a pytree, and parts of a nested dict by these paths."""

from collections.abc import Callable

import jax


def path_name(path) -> str:
    """A jax.tree_util key path as text, e.g. 'blocks/main/attention/query/kernel'."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def by_path(tree) -> dict:
    """{path as text: leaf} of all leaves."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def nested(flat: dict) -> dict:
    """The nested dict of {path as text: leaf}."""
    from flax.traverse_util import unflatten_dict  # it takes a second

    return unflatten_dict(flat, sep="/")


def split(tree: dict, chosen: Callable[[str], bool], prefix: str = "") -> tuple[dict, dict]:
    """Two nested dicts: the leaves of `tree` whose path is `chosen`, and the others. `prefix` is the path of `tree`."""
    parts: tuple[dict, dict] = {}, {}
    for name, value in tree.items():
        if isinstance(value, dict):
            for part, inner in zip(parts, split(value, chosen, f"{prefix}{name}/"), strict=True):
                if inner:
                    part[name] = inner
        else:
            parts[0 if chosen(prefix + name) else 1][name] = value
    return parts


def join(tree: dict, other: dict) -> dict:
    """One nested dict with the leaves of both. Where both have a leaf, it is that of `other`."""
    shared = {name for name in tree.keys() & other.keys() if isinstance(tree[name], dict)}
    return tree | other | {name: join(tree[name], other[name]) for name in shared}
