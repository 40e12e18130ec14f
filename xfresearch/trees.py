"""Names of the leaves of a pytree."""


def path_name(path) -> str:
    """A jax.tree_util key path as text, e.g. 'blocks/main/attention/query/kernel'."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
