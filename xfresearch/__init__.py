"""xfresearch: a research codebase for transformer variants.

    import xfresearch as xf
    lm = xf.load("runs/a")

The package imports each name on first use, so that `import xfresearch` and `--help` never wait for JAX.
"""

import sys
import types

_HOMES = {
    "load": "loading.loading",
    "LanguageModel": "loading.language_model",
    "Patch": "models.taps",
    "costs": "run_config.closed_form",
    "UserError": "runtime.errors",
    "train": "train",
    "sweep": "studies.sweep",
    "study": "study",
    "compare": "compare",
    "Run": "training.trained_run",
    "Callback": "training.callbacks",
    "StopTraining": "training.callbacks",
}
__all__ = sorted(_HOMES)
__version__ = "0.2.0"


class _Package(types.ModuleType):
    """`xf.train` and `xf.compare` stay the functions when the commands of these names, which are modules, are imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'xfresearch' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"xfresearch.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
