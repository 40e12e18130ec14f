"""The cases of all variants, which the files of this folder have (case.py), by the tables of `xfresearch/models/`."""

import importlib
import pkgutil

from tests.variants.case import (
    NORM,
    ActivationCase,
    Case,
    FeedForwardCase,
    LayoutCase,
    MixerCase,
    ModelCase,
    NormCase,
    Parameter,
)
from tests.variants.parameters import GAIN_AND_BIAS

CASES: list[Case] = []
for _file in pkgutil.iter_modules(__path__):
    CASES += getattr(importlib.import_module(f"{__name__}.{_file.name}"), "CASES", [])


def _of(kind: type) -> dict:
    """{name: case} of a table. Raises ValueError for two cases of one name."""
    cases = [case for case in CASES if isinstance(case, kind)]
    table = {case.name: case for case in cases}
    if len(table) < len(cases):
        raise ValueError(f"two cases have one name: {sorted(case.name for case in cases)}")
    return table


LAYOUTS, MIXERS, NORMS = _of(LayoutCase), _of(MixerCase), _of(NormCase)
FEED_FORWARDS, ACTIVATIONS = _of(FeedForwardCase), _of(ActivationCase)
MODEL = _of(ModelCase)["model"]


def parameters(case: Case) -> dict[str, Parameter]:
    """{path: parameter} of a case, with those of each NORM."""
    of_norm = GAIN_AND_BIAS | {name: each for norm in NORMS.values() for name, each in norm.parameters.items()}
    norms = [path for path, parameter in case.parameters.items() if parameter is NORM]
    of_norms = {f"{path}/{name}": parameter for path in norms for name, parameter in of_norm.items()}
    return of_norms | {path: parameter for path, parameter in case.parameters.items() if parameter is not NORM}
