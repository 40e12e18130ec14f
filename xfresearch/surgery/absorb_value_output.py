"""absorb_value_output: W_V and W_O become one matrix per head, or get another gauge.

    y = sum_h (sum_s w_hs (x_s W_V + b_V)) W_O,h        = sum_h (sum_s w_hs x_s) W_V W_O,h + b_V W_O,h if sum_s w_hs = 1

The weights w do not depend on the values, so W_h = W_V W_O,h computes the same (value='identity_whole'). Its size is D x D,
or W x D if the values are of a source of width W. Heads of a group share W_V, and each gets its own W_h. b_V moves to the
output if the weights sum to 1: not under a sink, where shaping changes the sum, or where a token sees nothing. In training,
dropout of the weights would drop b_V with them before and not after: it is set to 0. A slot's value m has no W_V:

    (m - b_V) W_O,h = m' W_V W_O,h        m' = (m - b_V) (W_V^T W_V)^-1 W_V^T

Instead of one matrix, gauge='balanced' or 'qr' keeps the size of the heads: W_V R and R^-1 W_O for an invertible R per
group. With the SVD W_V W_O = U S Z^T, 'balanced' has W_V R = U sqrt(S) and R^-1 W_O = sqrt(S) Z^T: both factors have the
same scale, which low precision wants. 'qr' has orthonormal W_V R from a QR with pivoted columns. 'first_rows' is the naive
choice, for comparison: the first rows of W_V R are the identity, and the others have the errors of an inverse.

An elementwise gate multiplies each number of a head between the two matrices, and clipping is not linear: refused.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
import scipy.linalg

from xfresearch.models.mixers.memory_slots import slot_heads, softmax_slots
from xfresearch.models.mixers.softmax.config import Attending
from xfresearch.models.sublayer import SublayerConfig
from xfresearch.surgery.biases import add_bias
from xfresearch.surgery.inverse import inverse
from xfresearch.surgery.key_value_groups import group_of_heads, pseudo_inverses
from xfresearch.surgery.network import ATTENDING, Network, Params, Target
from xfresearch.surgery.refused import refuse_unless, required
from xfresearch.surgery.registry import conversion

Gauge = Literal["merged", "balanced", "qr", "first_rows"]


@conversion(
    "W_V W_O as one matrix per head, or in another gauge",
    conditions="softmax attention with both matrices, without clipping or an elementwise gate; a bias of the value needs "
    "weights that sum to 1",
    broken="with the rows of W_V W_O in reverse order, or R^T for the inverse of R",
    roles=ATTENDING,
    options={"gauge": "merged: one matrix; the others keep the size of the heads"},
)
def absorb_value_output(network: Network, mixers: list[Target], broken: bool = False, gauge: Gauge = "merged") -> Network:
    for each in mixers:
        _check(each.options, each.where)
    if gauge != "merged":
        return network.change_each(
            mixers, lambda each: each.options, lambda each, params: _regauged(each, params, network.figures, gauge, broken)
        )
    moved = [each for each in mixers if network.inside(each).get("value/bias", np.zeros(1)).any()]
    for each in moved:
        _check_bias(each.options, each.where)
    dropped = frozenset(["weights of attention"] if any(each.options.dropout for each in moved) else [])
    network = replace(network, undropped=network.undropped | dropped)
    return network.change_each(
        mixers,
        lambda each: replace(_merged(each.options), dropout=0.0 if dropped else each.options.dropout),
        lambda each, params: _merge(each, params, network.figures, broken),
    )


def _check(options: SublayerConfig, where: str) -> None:
    a = required(options, Attending, f"{where}: a mixer of kind {options.kind!r} has no terms w x W_V W_O")
    refuse_unless(a.value == "learned", f"{where}: value={a.value!r} is no matrix of its own")
    refuse_unless(a.output == "learned", f"{where}: output={a.output!r} is no matrix")
    refuse_unless(not a.clip, f"{where}: clip is not linear in x W_V")
    gate = a.output_gate
    refuse_unless(gate != "elementwise", f"{where}: output_gate={gate!r} multiplies each number between W_V and W_O")


def _check_bias(a, where: str) -> None:
    """Raises Refused if b_V cannot leave the sum over the context."""
    sums = f"{where}: b_V W_O needs weights that sum to 1"
    instead = "(gauge='balanced' leaves b_V where it is)"
    refuse_unless(a.sink == "none", f"{sums}: sink={a.sink!r} adds a term to the denominator {instead}")
    refuse_unless(a.shaping == "none", f"{sums}: shaping={a.shaping!r} mixes them with I and C {instead}")
    refuse_unless(a.output_gate == "none", f"{sums}: output_gate={a.output_gate!r} multiplies each head {instead}")
    sees = a.sees_itself or softmax_slots(a) > 0
    refuse_unless(sees, f"{sums}: with sees_itself=False the first token sees none {instead}")


def _merged(a: Attending) -> Attending:
    bias = tuple(name for name in a.bias if name != "value")
    bias += ("output",) if "value" in a.bias and "output" not in bias else ()
    return replace(a, value="identity_whole", bias=bias, memory_heads="each" if softmax_slots(a) else a.memory_heads)


def _merge(target: Target[Attending], params: Params, figures: dict[str, float], broken: bool) -> Params:
    a = target.options
    value_DGV, output_HVD = params["value/kernel"], params["output/kernel"]
    value_DHV = value_DGV[:, group_of_heads(a)]
    merged_HDD = value_DHV.swapaxes(0, 1) @ output_HVD
    new = {path: each for path, each in params.items() if not path.startswith("value/")}
    new["output/kernel"] = merged_HDD[:, ::-1] if broken else merged_HDD
    bias_GV = params.get("value/bias", np.zeros(value_DGV.shape[1:]))
    if "value" in a.bias:
        add_bias(new, "output/bias", np.einsum("hv,hve->e", bias_GV[group_of_heads(a)], output_HVD))
    if softmax_slots(a):
        new |= _slots(target, params, bias_GV, figures)
    return new


def _slots(target: Target[Attending], params: Params, bias_GV: np.ndarray, figures: dict[str, float]) -> Params:
    """The values of the slots as m' [M, G, D]. Their stored scale, the root of M, does not change."""
    a = target.options
    value_DGV = params["value/kernel"]
    stored_MGV = params["memory/value"]
    scale = np.sqrt(a.memory_slots)
    inverse_GVD = pseudo_inverses(value_DGV, figures, f"{target.where}, W_V")
    value_MGD = np.einsum("mgv,gvd->mgd", scale * stored_MGV - bias_GV, inverse_GVD) / scale
    key_MGK = params["memory/key"]  # which all heads may have shared
    return {"memory/value": value_MGD, "memory/key": np.broadcast_to(key_MGK, (len(key_MGK), a.kv_heads, key_MGK.shape[-1]))}


def _regauged(target: Target, params: Params, figures: dict[str, float], gauge: str, broken: bool) -> Params:
    """The parameters with W_V R and R^-1 W_O; biases of the values and values of slots are multiplied by R too."""
    a = target.options
    value_DGV, output_HVD = params["value/kernel"], params["output/kernel"]
    new_value, new_output = value_DGV.copy(), output_HVD.copy()
    rotations = []
    for group in range(a.kv_heads):
        heads = np.flatnonzero(group_of_heads(a) == group)
        output_VE = np.concatenate([output_HVD[head] for head in heads], 1)
        part = "first rows of " if gauge == "first_rows" else ""
        where = f"{target.where}, {part}W_V of group {group}"
        rotation, back = _gauge(value_DGV[:, group], output_VE, gauge, figures, where)
        rotations.append(rotation)
        new_value[:, group] = value_DGV[:, group] @ rotation
        parts = (rotation.T if broken else back) @ output_VE
        new_output[heads] = np.stack(np.split(parts, len(heads), 1))
    rotation_GVV = np.stack(rotations)
    new = params | {"value/kernel": new_value, "output/kernel": new_output}
    if "value/bias" in params:
        new["value/bias"] = np.einsum("gv,gvw->gw", params["value/bias"], rotation_GVV)
    if softmax_slots(a):
        one = "slots that all heads share would need one gauge for all groups (gauge='merged' needs none)"
        refuse_unless(slot_heads(a) == a.kv_heads, one)
        new["memory/value"] = np.einsum("mgv,gvw->mgw", params["memory/value"], rotation_GVV)
    return new


def _gauge(value_DV, output_VE, gauge: str, figures: dict[str, float], where: str) -> tuple[np.ndarray, np.ndarray]:
    """R and its inverse for one group. `where` names the matrix that is inverted."""
    D, V = value_DV.shape
    refuse_unless(D >= V, f"{where} is {(D, V)}: its columns are dependent")
    if gauge == "first_rows":
        rows_VV = value_DV[:V]
        return inverse(rows_VV, figures, where), rows_VV
    _, upper_VV, order = scipy.linalg.qr(value_DV, mode="economic", pivoting=True)
    upper_VV = upper_VV[:, np.argsort(order)]  # W_V is an orthonormal matrix times this one, of the same condition
    if gauge == "qr":
        return inverse(upper_VV, figures, where), upper_VV
    left, sizes, _ = np.linalg.svd(upper_VV @ output_VE, full_matrices=False)
    refuse_unless(sizes[-1] > 1e-12 * sizes[0], "W_V W_O has a smaller rank than the heads: it has no balanced gauge")
    scaled_VV = left * np.sqrt(sizes)  # an orthonormal matrix with scaled columns: its inverse is exact
    return inverse(upper_VV, figures, where) @ scaled_VV, (left / np.sqrt(sizes)).T @ upper_VV
