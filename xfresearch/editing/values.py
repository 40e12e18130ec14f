"""The values of a memory as arrays that an edit changes, whatever kind of memory it is.

Head h of a memory writes m_h^T v_g W_h: coefficients m_h [M], values v_g [M, V] of its group g, and W_h [V, D], its part
of W_O. A feed-forward layer is one head with M = F units, the rows of W_down as values, and W = 1. Experts are one head,
whose M = E F coefficients are multiplied by the gates and are 0 for the experts that a token did not choose: this decides
how an edit is shared among the experts of the subject. So one formula edits them all.

ROME (Meng et al. 2022, eq. 2) asks for the change of the values that adds delta to what the key m* writes, and that least
changes what other keys write: the minimum of sum_g tr(dv_g^T C_g dv_g), with C_g = sum_h E[m_h m_h^T] over the heads of a
group. With Lagrange multipliers lambda [D] it is

    dv_g = C_g^-1 sum_h m*_h (W_h lambda)^T        S lambda = delta
    S    = sum_g sum_hh' (m*_h^T C_g^-1 m*_h') W_h^T W_h'

For one head with W = 1 this is the paper's C^-1 k* (v* - W k*)^T / (k*^T C^-1 k*).

MEMIT (Meng et al. 2023, eq. 14) asks for the writes R [N, D] of N keys at once, and trades them against what other keys
write: the minimum of a sum_g tr(dv_g^T C_g dv_g) + sum_n |written by key n - R_n|^2. Its solution has the same form,

    dv_g = (a C_g)^-1 sum_n sum_h m_nh (W_h mu_n)^T        (S + 1) mu = R

with the S of all pairs of keys. For one head with W = 1 this is the paper's (a C + K^T K)^-1 K^T R.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy import linalg
from scipy.sparse import linalg as sparse_linalg

from xfresearch.analysis.coefficients import sublayer_of, where, written_by
from xfresearch.loading import edits
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models.sublayer import MemoryPart
from xfresearch.models.taps import of_encoder
from xfresearch.runtime.errors import UserError

STEPS = 5000  # of conjugate gradients, at most


class Values(NamedTuple):
    """The values of one memory, in float64."""

    path: tuple[str, ...]  # of the parameter, in the parameters of the layer
    gain: float  # the values are the parameter times this
    values_GMV: np.ndarray
    output_HVD: np.ndarray | None  # W_h; None for one head with W = 1

    def groups(self) -> list[list[int]]:
        """The heads of each group of values."""
        heads = 1 if self.output_HVD is None else len(self.output_HVD)
        share = heads // len(self.values_GMV)
        return [list(range(g * share, (g + 1) * share)) for g in range(len(self.values_GMV))]


def values_of(lm: LanguageModel, memory: str) -> Values:
    """The values of a memory, such as 'blocks.3.feed_forward' (analysis/coefficients.py). Raises UserError if an edit cannot
    change them."""
    path, part = path_of(lm, memory), _part(lm, memory)
    if lm.config.encoder and not of_encoder(memory):
        what = "the subject stands in the source, which the decoder's memories do not read; give one of the encoder"
        raise UserError(f"memory={memory!r} is not allowed with rome and memit: {what}, or use fine-tuning")
    value = np.asarray(leaf_of(lm, memory, path), np.float64)
    if not part.heads:
        return Values(path, part.gain, part.gain * value.reshape(1, -1, value.shape[-1]), None)  # of experts E F rows
    options = sublayer_of(lm.config, memory).options
    gate = getattr(options, "output_gate", "none")
    if gate != "none":  # W_h would be another one for each token
        what = f"output_gate={gate!r} multiplies what the slots write before W_O"
        raise UserError(f"memory={memory!r} is not allowed with rome and memit: {what}; use fine-tuning")
    values_GMV = part.gain * value.swapaxes(0, 1)
    V = values_GMV.shape[-1]
    output_HVD = np.eye(part.heads * V).reshape(part.heads, V, -1)
    if part.through:
        output_HVD = np.asarray(leaf_of(lm, memory, (path[0], *part.through.split("/"))), np.float64)
    return Values(path, part.gain, values_GMV, output_HVD)


def path_of(lm: LanguageModel, memory: str) -> tuple[str, ...]:
    """The parameter of the layer that has the values of a memory. Raises UserError for shared experts."""
    name, _, part = where(memory)[1].partition(".")
    if part:
        raise UserError(f"memory={memory!r} is not allowed: shared experts see all tokens; edit those that tokens choose")
    return name, *_part(lm, memory).path.split("/")


def _part(lm: LanguageModel, memory: str) -> MemoryPart:
    return sublayer_of(lm.config, memory).options.memory_parts[where(memory)[1].partition(".")[2]]


def with_change(lm: LanguageModel, memory: str, change_GMV: np.ndarray) -> LanguageModel:
    """The model whose values are larger by `change_GMV`."""
    values = values_of(lm, memory)
    leaf = leaf_of(lm, memory, values.path)
    step = change_GMV / values.gain
    step = step.swapaxes(0, 1) if leaf.ndim == 3 and values.output_HVD is not None else step.reshape(leaf.shape)
    return with_leaf(lm, memory, values.path, jnp.asarray(np.asarray(leaf, np.float64) + step, leaf.dtype))


def leaf_of(lm: LanguageModel, memory: str, path: tuple[str, ...]):
    """A parameter of the layer of a memory."""
    return edits.leaf_of(lm.config, lm.params, name_of(memory, path))


def name_of(memory: str, path: tuple[str, ...]) -> str:
    """The name of a parameter of the layer of a memory (loading/edits.py)."""
    return ".".join((written_by(memory).rpartition(".")[0], *path))


def with_leaf(lm: LanguageModel, memory: str, path: tuple[str, ...], leaf) -> LanguageModel:
    """The model with another parameter in the layer of a memory."""
    return lm.with_params(edits.with_leaf(lm.config, lm.params, name_of(memory, path), leaf))


def factored(covariance_GMM: np.ndarray) -> list:
    """The Cholesky factors of C, one for each group. Raises UserError if C is singular."""
    return [_factor(C_MM) for C_MM in covariance_GMM]


def rome_change(values: Values, factors: list, key_HM: np.ndarray, delta_D: np.ndarray) -> np.ndarray:
    """The change [G, M, V] that adds delta_D to what key_HM writes (see above). factors: of C, see factored."""
    solved = [linalg.cho_solve(factor, key_HM[heads].T).T for factor, heads in zip(factors, values.groups(), strict=True)]
    D = len(delta_D)
    if values.output_HVD is None:
        direction_D = delta_D / (solved[0][0] @ key_HM[0])
        return (solved[0][0][:, None] * direction_D)[None]
    S_DD = np.zeros((D, D))
    for heads, solved_hM in zip(values.groups(), solved, strict=True):
        gram_hh = solved_hM @ key_HM[heads].T
        W_hVD = values.output_HVD[heads]
        S_DD += np.einsum("hi,hvd,ive->de", gram_hh, W_hVD, W_hVD, optimize=True)
    multiplier_D = linalg.lstsq(S_DD, delta_D, cond=D * np.finfo(float).eps, lapack_driver="gelsy")[0]
    change = [
        np.einsum("hm,hvd,d->mv", solved_hM, values.output_HVD[heads], multiplier_D, optimize=True)
        for heads, solved_hM in zip(values.groups(), solved, strict=True)
    ]
    return np.stack(change)


def memit_change(values: Values, covariance_GMM: np.ndarray, keys_NHM, asked_ND: np.ndarray, weight: float) -> np.ndarray:
    """The change [G, M, V] of MEMIT for keys_NHM that should write asked_ND more (see above). weight: a. Raises UserError if
    C is singular."""
    covariance_GMM = weight * covariance_GMM
    output_HVD = values.output_HVD
    if output_HVD is None:
        K_NM = keys_NHM[:, 0]
        return linalg.cho_solve(_factor(covariance_GMM[0] + K_NM.T @ K_NM), K_NM.T @ asked_ND)[None]
    groups = values.groups()
    solved = [_solve_heads(C_MM, keys_NHM[:, heads]) for C_MM, heads in zip(covariance_GMM, groups, strict=True)]

    def change(mu_ND) -> np.ndarray:
        outputs = (output_HVD[heads] for heads in groups)
        pairs = zip(solved, outputs, strict=True)
        return np.stack([np.einsum("nhm,hvd,nd->mv", s_NhM, W_hVD, mu_ND, optimize=True) for s_NhM, W_hVD in pairs])

    def all_written(mu_X) -> np.ndarray:
        written_ND = mu_X.reshape(asked_ND.shape)
        for change_MV, heads in zip(change(written_ND), groups, strict=True):
            arrays = keys_NHM[:, heads], change_MV, output_HVD[heads]
            written_ND = written_ND + np.einsum("nhm,mv,hvd->nd", *arrays, optimize=True)
        return written_ND.ravel()

    # S + 1 is symmetric and positive definite, and N D x N D: too large to be made.
    operator = sparse_linalg.LinearOperator((asked_ND.size, asked_ND.size), all_written, dtype=np.float64)
    mu_X, failed = sparse_linalg.cg(operator, asked_ND.ravel(), rtol=1e-8, maxiter=STEPS)
    if failed:
        raise UserError(f"the change of the values was not found in {STEPS} steps: C is nearly singular; raise the ridge")
    return change(mu_X.reshape(asked_ND.shape))


def _solve_heads(C_MM: np.ndarray, keys_NhM: np.ndarray) -> np.ndarray:
    return linalg.cho_solve(_factor(C_MM), keys_NhM.reshape(-1, len(C_MM)).T).T.reshape(keys_NhM.shape)


def written(values: Values, change_GMV: np.ndarray, key_HM: np.ndarray) -> np.ndarray:
    """[D]: what key_HM writes through values, or a change of values."""
    terms = []
    for change_MV, heads in zip(change_GMV, values.groups(), strict=True):
        for head in heads:
            of_head_V = key_HM[head] @ change_MV
            terms.append(of_head_V if values.output_HVD is None else of_head_V @ values.output_HVD[head])
    return np.sum(terms, 0)


def _factor(C_MM: np.ndarray) -> tuple:
    try:
        return linalg.cho_factor(C_MM)
    except linalg.LinAlgError:
        raise UserError(
            f"the covariance of {len(C_MM)} coefficients is singular: estimate it from more tokens, or raise the ridge"
        ) from None
