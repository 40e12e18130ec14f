"""Names of the leaves of a nested dict or module."""


def path_name(path) -> str:
    """A key path of jax.tree_util as 'blocks/main/attention/query/kernel'."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
