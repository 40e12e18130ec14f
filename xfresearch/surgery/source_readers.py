"""Cross-attention that reads the encoder's output in another form: s = y M + b, where the encoder now writes y.

    s W_K + b_K = y (M W_K) + (b W_K + b_K)        likewise W_V
    (x W_h + b_h) s^T = (x W_h + b_h) M^T y^T + (x W_h + b_h) b^T

Conversions of the encoder make M and b: the gain and the bias of its final norm, or a basis of its stream. They do not touch
the stream of the decoder, whose basis is independent. The last term is the same for all tokens of the source, so the softmax
over them cancels it. Slots and sinks do not have it, and with a softcap it does not cancel. Where a key or a value is s
itself, no matrix can take M.
"""

from dataclasses import replace

import numpy as np

from xfresearch.models.mixers.memory_slots import softmax_slots
from xfresearch.models.mixers.softmax.cross import CrossConfig
from xfresearch.surgery.biases import add_bias, with_biases
from xfresearch.surgery.network import End, Network, Params, Target, names_of
from xfresearch.surgery.refused import Refused, refuse_unless
from xfresearch.surgery.stream_maps import product


def with_encoder(network: Network, encoder: Network) -> Network:
    """The network of a decoder with another encoder, whose output it reads as the encoder's `end` says."""
    read = network if encoder.end is None else read_as(network, encoder.end)
    return replace(read, encoder=replace(encoder, end=None))


def read_as(network: Network, end: End) -> Network:
    """The network of a decoder whose cross-attention reads y M + b for y."""
    numbers = [number for number, at in enumerate(network.layers) if names_of(at.block, "cross")]
    targets = network.targets(("cross",), numbers)
    moved = end.matrix_ED.shape[0] != end.matrix_ED.shape[1] or bool((end.matrix_ED != np.eye(len(end.matrix_ED))).any())
    biased = bool(end.bias_D.any())
    for each in targets if moved or biased else ():
        _check(each.options, moved, biased, each.where)

    def params(target: Target, old: Params) -> Params:
        new = dict(old)
        for term in [term for term in network.terms(target.number, target.name) if term.of_source]:
            kernel, bias = (path.removeprefix(f"{target.name}/") for path in (term.kernel, term.bias))
            (at,) = term.of_source
            new[kernel] = product(end.matrix_ED, old[kernel], at)
            if term.reads and bias in old:  # of W_h, whose bias b_h meets the source too
                new[bias] = old[bias] @ end.matrix_ED.T
            elif biased and not term.reads:
                add_bias(new, bias, np.tensordot(end.bias_D, old[kernel], (0, at)))
        return new

    return network.change_each(targets, lambda each: _with_biases(each.options) if biased else each.options, params)


def _with_biases(a: CrossConfig) -> CrossConfig:
    """The options with biases on the matrices that read the source."""
    new = with_biases(a, {name for name in a.of_source if getattr(a, name) == "learned"})
    assert isinstance(new, CrossConfig)
    return new


def _check(a: CrossConfig, moved: bool, biased: bool, where: str) -> None:
    """Raises Refused if a key or a value is the source itself, or if a term of b does not cancel."""
    itself = {name: kind for name, kind in a.identities.items() if name in a.of_source}
    merged = itself.pop("key", "") if a.both_sides else ""
    if merged and a.value == "key":
        itself["value"] = "key"
    for name, kind in itself.items():
        raise Refused(f"{where}: {name}={kind!r} is the encoder's output itself, and no matrix could take its gain")
    if not merged:
        return
    cancels = f"{where}: (x W_h + b_h) b^T is a term that the softmax over the source cancels, and"
    refuse_unless(not (biased and (a.memory_slots or a.sinks)), f"{cancels} slots or a sink do not have it")
    refuse_unless(not (biased and a.softcap), f"{cancels} with softcap={a.softcap} it does not cancel")
    once = f"{where}: W_h M^T is for keys that are the encoder's output, and those of slots are trained"
    refuse_unless(not (moved and softmax_slots(a)), once)
