"""Applies conversions to a language model, and certifies the result."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np

from xfresearch.data.pipeline import evaluation_batches, prepare
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models.words import model_in_words
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.progress import stage
from xfresearch.surgery.certificate import BOUND, CONTROL, LONGEST, Certificate, HeldOut, Inputs, certify
from xfresearch.surgery.conversion import EVERYWHERE, Conversion, Where
from xfresearch.surgery.network import Network, assemble, take_apart
from xfresearch.surgery.refused import Refused

TEXT_ROWS = 2


class Step(NamedTuple):
    """One conversion of a chain, with its arguments."""

    conversion: Conversion
    where: Where = EVERYWHERE
    options: dict[str, Any] = {}

    def __call__(self, network: Network, broken: bool | str = False) -> Network:
        """The network after it."""
        return self.conversion(network, broken=broken, **self.where._asdict(), **self.options)


def convert(lm: LanguageModel, steps: Sequence[Step]) -> tuple[LanguageModel, Certificate]:
    """The model after all steps, and the certificate of the chain.

    The records of edits, and of a Hugging Face folder, are those of the model before: they are left out, with a warning.
    Raises Refused if a step does not apply, or if the certificate shows that the result computes another function. In a
    chain with approximations, each run of exact steps between them has to compute the same function.
    """
    before = take_apart(lm.config, lm.params)
    after = _after(before, steps)
    text = held_out_text(lm)
    certificate = _certified(before, after, steps, text)
    if certificate.approximate:
        for network, run in _exact_runs(before, steps):
            part = _certified(network, _after(network, run), run, text)
            certificate.figures[f"difference of logits, {', '.join(part.conversions)} alone"] = part.relative
    if left := left_out(lm):
        print(f"warning: {left}", file=sys.stderr)
    model, params = assemble(after, lm.config.param_dtype)
    return LanguageModel(model, params, lm.tokenizer, lm.run, lm.step), certificate


def _certified(before: Network, after: Network, steps: Sequence[Step], text: HeldOut) -> Certificate:
    """The certificate of a chain. Raises Refused if no step is an approximation and the networks are not equal, or if an
    approximation is not finite."""
    approximate = any(step.conversion.approximates(step.options) for step in steps)
    certificate = Certificate([step.conversion.name for step in steps], approximate)
    with jax.enable_x64(True), stage("certificate"):
        try:
            certify(certificate, before, after, _controls(before, steps), text)
        except Refused as refused:  # of a layer's parameters, which are computed late: a matrix has no inverse
            raise Refused(f"{', '.join(certificate.conversions)}: {refused}") from refused
    certificate.figures = after.told[0]
    if certificate.not_finite or not (certificate.approximate or certificate.exact):
        raise Refused(_why(certificate))
    return certificate


def _exact_runs(network: Network, steps: Sequence[Step]) -> Iterator[tuple[Network, list[Step]]]:
    """The longest runs of steps that are no approximations, each with the network before it."""
    for approximate, group in groupby(steps, lambda step: step.conversion.approximates(step.options)):
        run = list(group)
        if not approximate:
            yield network, run
        network = _after(network, run)


def left_out(lm: LanguageModel) -> str:
    """Names of the records that the converted model does not keep, because they describe arrays of other names or shapes."""
    parts = []
    if lm.edits:
        parts.append(f"the records of its edits ({len(lm.edits)}), which cannot be undone after the conversion")
    if lm.source:
        parts.append("the record of its Hugging Face folder, whose other keys and files an export will lack")
    what = ", and ".join(parts)
    return f"the converted model does not carry {what}" if what else ""


def plan(lm: LanguageModel, steps: Sequence[Step]) -> str:
    """The model that the steps would make, in words. Raises Refused if one does not apply. Nothing is compared."""
    network = _after(take_apart(lm.config, lm.params), steps)
    for each in network.stacks:
        for number in range(len(each.layers)):
            each.params(number)  # it may have no inverse
    return f"{', '.join(step.conversion.name for step in steps)}: {model_in_words(network.resolved)}"


def _after(network: Network, steps: Sequence[Step], broken: str = "") -> Network:
    """The network after the steps. The last one is its control in the stack `broken`, if that is given."""
    network = network.fresh()
    for number, step in enumerate(steps, 1):
        network = step(network, broken=broken if number == len(steps) else False)
    return network


def held_out_text(lm: LanguageModel) -> HeldOut:
    """Rows of held-out text; none if there is no tokenizer, no corpus here, or less text than one row. Those of a model with
    an encoder are pairs of a source and a target as in training, of which padding is read like any token."""
    length = min(lm.config.max_length or LONGEST, LONGEST)
    try:
        if lm.config.encoder:
            run = replace(lm.run, sequence_length=min(lm.run.sequence_length, length))
            pairs = prepare(run, run.evaluation.split, tokenizer=lm.tokenizer)
            batch = next(iter(evaluation_batches(pairs, TEXT_ROWS, TEXT_ROWS)))
            return HeldOut(Inputs(batch["tokens"], batch["source"])) if "source" in batch else HeldOut()
        text_BL = np.concatenate([*lm.batches(length=length, limit=TEXT_ROWS)])
    except (UserError, ValueError):
        return HeldOut()
    assert lm.tokenizer is not None  # without one there are no batches
    n_bytes = sum(len(lm.tokenizer.decode(row[1:].tolist()).encode()) for row in text_BL)
    return HeldOut(Inputs(text_BL), n_bytes)


def _controls(before: Network, steps: Sequence[Step]) -> dict[str, Network]:
    """For each step, the networks after the chain up to this step, which is broken in one stack. The chain ends there,
    because a later step may not apply to a broken network."""
    controls = {}
    for number, step in enumerate(steps, 1):
        for stack in step.conversion.stacks(before, step.where):
            name = f"{step.conversion.name}{f' of the {stack}' if before.encoder else ''}, {step.conversion.broken}"
            controls[name] = _after(before, steps[:number], stack)
    return controls


def _why(certificate: Certificate) -> str:
    """The reason why a certificate is not exact."""
    names = ", ".join(certificate.conversions)
    if certificate.not_finite:
        return f"{names}: the comparison ({certificate.not_finite[0]}) is not finite in float64: it proves nothing"
    if certificate.relative > BOUND:
        where = f"; they first differ at {certificate.first_difference}" if certificate.first_difference else ""
        return f"{names}: logits differ by {certificate.relative:.1e} relative in float64, more than {BOUND:.0e}{where}"
    weak = min(certificate.controls, key=certificate.controls.__getitem__)
    return (
        f"{names}: the control ({weak}) differs by {certificate.controls[weak]:.1e} only, less than {CONTROL:.0e}: "
        "equal logits prove nothing for these parameters"
    )
