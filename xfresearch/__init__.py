"""xfresearch: a research codebase for transformer variants.

    import xfresearch as xf
    lm = xf.load("runs/a")

The package imports each name on first use, so that `import xfresearch` and `--help` never wait for JAX.
"""

_HOMES = {
    "load": "loading.loading",
    "LanguageModel": "loading.language_model",
    "Patch": "models.taps",
    "costs": "run.closed_form",
    "UserError": "runtime.errors",
}
__all__ = sorted(_HOMES)
__version__ = "0.2.0"


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'xfresearch' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"xfresearch.{_HOMES[name]}"), name)


def __dir__():
    return [*globals(), *_HOMES]
