"""Keys of an edit: the coefficients that a subject has in a memory, and the second moments of all coefficients.

    k*   mean of the coefficients at the last token of the subject, over texts that end in the prompt: the prompt alone, and
         after each of some prefixes that the model writes itself (Meng et al. 2022, eq. 3)
    C    E[m m^T] over the tokens of a corpus, not centred; for slots the sum over the heads of a group

With an encoder the subject stands in the source: keys are those of a memory of the encoder there, and C that over the
sources of a corpus, without padding.

C depends on the model and the text, not on the request: it is computed once and kept in the cache under the hash of both. An
interrupted pass goes on where it was.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis.coefficients import of_keys, sites
from xfresearch.analysis.sequences import Sequences, passed, sequences
from xfresearch.analysis.tap_vectors import stack_of
from xfresearch.analysis.unfinished import Unfinished, digest_of
from xfresearch.data.cache import cache_root
from xfresearch.data.records import Record
from xfresearch.editing.texts import fitting, prompts_after
from xfresearch.editing.values import values_of
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.sampling import NO_RULES
from xfresearch.models.taps import captured, request
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.progress import stage

PREFIXES = ((10, 5), (10, 10))  # (how many, tokens of each), as in the published code
TOKENS = 100_000  # for C
BATCH = 8
RIDGE = 1e-2  # of the mean of C's diagonal: units that are never active have no variance


def prefixes_of(lm, seed: int = 0) -> list[str]:
    """Texts before the prompt: an empty one, and texts that the model writes, each with a full stop; with an encoder those
    after an empty source."""
    prefixes = [""]
    for count, length in PREFIXES:
        source = {"source": [""] * count} if lm.config.encoder else {}
        seeds = [seed * 1000 + len(prefixes) + number for number in range(count)]
        how = {"max_new_tokens": length, "temperature": 1.0, "top_p": 1.0, "seed": seeds, **vars(NO_RULES)}
        texts = lm.generate([""] * count, **how, **source)
        prefixes += [f"{text.strip().rstrip('.')}. " for text in texts]
    return prefixes


def keys_of(lm, memory: str, record: Record, prefixes: list[str]) -> np.ndarray:
    """[J, H, M] in float64: the coefficients at the last token of the subject after each prefix. Raises UserError for a text
    beyond the model's table of positions."""
    prompts = [prompt._replace(target=()) for prompt in prompts_after(lm, record, prefixes)]
    m_JLK = coefficients(lm.config, memory, lm.params, fitting(lm, prompts)[0])
    last_J = np.array([prompt.last for prompt in prompts])
    m_JK = np.asarray(m_JLK[jnp.arange(len(prompts)), last_J], np.float64)
    return m_JK.reshape(len(m_JK), -1, values_of(lm, memory).values_GMV.shape[1])


@partial(jax.jit, static_argnums=(0, 1))
def coefficients(model: ModelConfig, memory: str, params: dict, rows: Sequences):
    """[B, L, K]: the coefficients of a memory; those of experts times their gates."""
    names = sites(model, memory)
    out = passed(model, params, rows, request(model, names))[1]
    return of_keys(model, memory, captured(model, out.captures, names), gated=True)


def covariance(lm, memory: str, data: str = "", tokens: int = TOKENS) -> np.ndarray:
    """C [G, M, M] of a memory, in float64, over the first `tokens` tokens of the train split of `data` (by default the first
    corpus of the model's run). Products, and their sums over BATCH rows, are in float32 at least. Raises UserError if the
    text cannot be read, or has less than a row."""
    rows = _rows(lm, data, tokens)
    read_NL = np.asarray(stack_of(rows, memory).real_NL)
    of = ("covariance", _summed(lm.config).name, memory, lm.config, lm.params, rows)
    kept = Unfinished(cache_root(lm.run.data) / "covariance" / f"{digest_of(*of)}.npz", *of)
    values = values_of(lm, memory)
    heads, M = sum(map(len, values.groups())), values.values_GMV.shape[1]
    state: dict = {"sum": np.zeros((heads, M, M)), "next": 0}
    state |= kept.load()
    sum_HMM, first = np.array(state["sum"]), int(state["next"])
    if first < len(rows):
        with stage(f"covariance of {memory}", len(rows), "rows") as progress:
            progress.update(first)
            for row in range(first, len(rows), BATCH):
                some, real_BL = rows.chosen(slice(row, row + BATCH)), read_NL[row : row + BATCH]
                sum_HMM += np.asarray(_moments(lm.config, memory, M, lm.params, some, real_BL), np.float64)
                kept.save({"sum": sum_HMM, "next": row + len(some)})
                progress.update(len(some))
        kept.save({"sum": sum_HMM, "next": len(rows)}, ended=True)
    return np.stack([sum_HMM[group].sum(0) for group in values.groups()]) / read_NL.sum()


def _rows(lm, data: str, tokens: int) -> Sequences:
    """About that many tokens of the train split of `data`; with an encoder, of its sources."""
    if lm.config.encoder:
        return sequences(lm, data or None, max(1, tokens // lm.run.source_length), split="train")
    length = lm.run.sequence_length
    parts = list(lm.batches(data, "train", limit=max(1, tokens // length)))
    if not parts:
        what = f"its train split is shorter than one row of {length} tokens, the model's sequence_length"
        raise UserError(f"data={data or lm.run.data.corpus[0]!r} is not allowed: {what}")
    return Sequences(np.concatenate(parts))


def _summed(model: ModelConfig) -> np.dtype:
    """The dtype in which coefficients are multiplied and added up: in bfloat16 three digits would be left of a sum."""
    return jnp.promote_types(model.dtype, jnp.float32)


def ridged(C_GMM: np.ndarray, ridge: float) -> np.ndarray:
    """C with `ridge` times the mean of its diagonal added to the diagonal."""
    M = C_GMM.shape[-1]
    return C_GMM + ridge * np.trace(C_GMM, axis1=1, axis2=2)[:, None, None] / M * np.eye(M)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _moments(model: ModelConfig, memory: str, M: int, params: dict, rows: Sequences, real_BL):
    """[H, M, M]: the sum of m m^T over the tokens that are no padding."""
    m_BLK = jnp.where(real_BL[..., None], coefficients(model, memory, params, rows), 0)
    m_BLHM = m_BLK.reshape(*m_BLK.shape[:2], -1, M).astype(_summed(model))
    return jnp.einsum("blhm,blhn->hmn", m_BLHM, m_BLHM, precision="highest")
