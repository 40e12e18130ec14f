"""Applies conversions to a language model, and certifies the result."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from xfresearch.errors import UserError
from xfresearch.language_model import LanguageModel
from xfresearch.models.words import model_in_words
from xfresearch.progress import stage
from xfresearch.surgery.certificate import BOUND, CONTROL, LONGEST, Certificate, certify
from xfresearch.surgery.conversion import Conversion
from xfresearch.surgery.network import Network, assemble, take_apart
from xfresearch.surgery.refused import Refused

TEXT_ROWS = 2


class Step(NamedTuple):
    """One conversion of a chain, with its arguments."""

    conversion: Conversion
    layers: tuple[int, ...] | None = None  # None for all
    options: dict = {}


def convert(lm: LanguageModel, steps: Sequence[Step]) -> tuple[LanguageModel, Certificate]:
    """The model after all steps, and the certificate of the chain.

    The records of edits, and of a Hugging Face folder, are those of the model before: they are left out, with a warning.
    Raises Refused if a step does not apply, or if the certificate shows that the result computes another function.
    """
    before = take_apart(lm.config, lm.params)
    after = _after(before, steps)
    approximate = any(step.conversion.approximates(step.options) for step in steps)
    found = Certificate([step.conversion.name for step in steps], approximate)
    with jax.enable_x64(True), stage("certificate"):
        text_BL, n_bytes = held_out_text(lm)
        try:
            certify(found, before, after, _controls(before, steps), text_BL, n_bytes)
        except Refused as refused:  # of a layer's parameters, which are computed late: a matrix has no inverse
            raise Refused(f"{', '.join(found.conversions)}: {refused}") from refused
        found.figures = after.figures
    if not found.approximate and not found.exact:
        raise Refused(_why(found))
    if left := left_out(lm):
        print(f"warning: {left}", file=sys.stderr)
    model, params = assemble(after, lm.config.param_dtype)
    return LanguageModel(model, params, lm.tokenizer, lm.run, lm.step), found


def left_out(lm: LanguageModel) -> str:
    """What the converted model does not carry, in words: it describes arrays and tensors of other names and shapes."""
    edits = lm.edits and f"the records of its edits ({len(lm.edits)}), which cannot be undone after the conversion"
    source = lm.source and "the record of its Hugging Face folder, whose other keys and files an export will lack"
    found = ", and ".join(filter(None, (edits, source)))
    return f"the converted model does not carry {found}" if found else ""


def plan(lm: LanguageModel, steps: Sequence[Step]) -> str:
    """The model that the steps would make, in words. Raises Refused if one does not apply. Nothing is compared."""
    network = _after(take_apart(lm.config, lm.params), steps)
    for number in range(len(network.layers)):
        network.params(number)  # it may have no inverse
    return f"{', '.join(step.conversion.name for step in steps)}: {model_in_words(network.resolved)}"


def _after(network: Network, steps: Sequence[Step], broken: int | None = None) -> Network:
    """The network after the steps. The step with the number `broken` is its control."""
    network = replace(network, figures={})
    for number, step in enumerate(steps):
        check_layers(step.layers, network)
        network = step.conversion(network, step.layers, broken=number == broken, **step.options)
    return network


def check_layers(chosen: tuple[int, ...] | None, network: Network) -> None:
    """Raises UserError for a layer that the network does not have."""
    last = len(network.layers) - 1
    for number in chosen or ():
        if not 0 <= number <= last:
            raise UserError(f"layers={number} is not allowed: this model has layers 0 to {last}")


def held_out_text(lm: LanguageModel) -> tuple[np.ndarray | None, int]:
    """Token ids [B, L] of held-out text and the bytes of the tokens after the first; (None, 0) if there is none."""
    length = min(lm.config.max_length or LONGEST, LONGEST)
    try:
        text_BL = np.concatenate([*lm.batches(length=length, limit=TEXT_ROWS)])
    except (UserError, ValueError):  # no tokenizer, no corpus here, or less text than one row
        return None, 0
    return text_BL, sum(len(lm.tokenizer.decode(row[1:].tolist()).encode()) for row in text_BL)


def _controls(before: Network, steps: Sequence[Step]) -> dict[str, Network]:
    """For each step, the chain with this step broken."""
    return {
        f"{step.conversion.name}, {step.conversion.broken}": _after(before, steps, number)
        for number, step in enumerate(steps)
    }


def _why(found: Certificate) -> str:
    """The reason why a certificate is not exact."""
    names = ", ".join(found.conversions)
    if found.relative > BOUND:
        where = f"; they first differ at {found.first_difference}" if found.first_difference else ""
        return f"{names}: logits differ by {found.relative:.1e} relative in float64, more than {BOUND:.0e}{where}"
    weak = min(found.controls, key=found.controls.get)
    return (
        f"{names}: the control ({weak}) differs by {found.controls[weak]:.1e} only, less than {CONTROL:.0e}: equal logits "
        "prove nothing for these parameters"
    )
