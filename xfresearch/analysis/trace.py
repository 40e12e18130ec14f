"""Causal tracing (Meng et al. 2022): where a fact is recalled from.

Three kinds of passes over a prompt: clean; corrupted, with noise N(0, (c sigma)^2) on the embeddings of the subject's
tokens; and restored, corrupted but for one value, or a window of layers of it, at one token, which is that of the clean
pass. P is the probability of the object's first token.

    total effect     P(clean) - P(corrupted), the corruption baseline
    indirect effect  P(restored) - P(corrupted), averaged over draws of the noise

c is 3. sigma is the standard deviation of the subjects' token embeddings, as they enter the residual stream: scaled, after
the embedding's norm where there is one, and without positions. The values that are restored:

    stream        the residual stream after the block: its output, after a post norm where there is one. In a parallel block
                  it is the stream after both sublayers; in ResiDual the first of the two streams.
    attention     what attention adds to the stream, with the slots of persistent memory
    feed_forward  what the feed-forward layer adds to the stream; with experts the sum of the chosen ones, times their gates
    slots         the weights of persistent memory slots, in each head

With an encoder the prompt is the source, and the object begins the target. The noise is on the encoder's embeddings. Values
of the encoder, encoder/stream and so on, have the tokens of the source; those of the decoder one token, the start id, which
predicts the object. What cross-attention writes is one of them.

Single states of the stream; windows of layers, centred, of the others: 10 of 48 layers in the paper, the same share here.
The classes of tokens are those of the paper's figure 2: first, middle and last token of the subject, the first one after it,
further ones, and the last token of the prompt. A subject of one token has a last one only.

Does the last token of the subject stand out? For each value, the best layer of each class is chosen on every other fact. On
the remaining facts the effect there is compared with that of every other class, fact by fact, in a one-sided paired t test.
The largest of these p-values is that of the value.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis.prompts import Prompt, check_fit, prompt_of, read
from xfresearch.analysis.registry import analysis
from xfresearch.analysis.result import Result
from xfresearch.analysis.sequences import Sequences, passed
from xfresearch.analysis.token_text import shown
from xfresearch.analysis.tracing import Effects, effects, normal, of_prompt, reader
from xfresearch.data.records import Record, read_record
from xfresearch.data.records import records as records_of
from xfresearch.models import transformer
from xfresearch.models.model_config import ModelConfig, predicts_next
from xfresearch.pages.figures import HeatMap, Table, table
from xfresearch.runtime.errors import NothingMeasured
from xfresearch.runtime.progress import stage
from xfresearch.runtime.summaries import mean_interval, mean_of_known
from xfresearch.runtime.tables import PLUS_MINUS

NOISE, SAMPLES, FACTS = 3.0, 3, 100
SHARE = 10 / 48  # of the layers in a window
READ = 64  # prompts at a time
CLASSES = ("first subject", "middle subject", "last subject", "first after", "further", "last")


@analysis(predicts_next, "which values a fact is recalled from: causal tracing")
def trace(
    lm, data=None, count: int = FACTS, window: int = 0, samples: int = SAMPLES, noise: float = NOISE, seed: int = 0
) -> Result:
    """The effects above, averaged over the first `count` facts of `data` whose object's first token the model predicts.

    data: records, as Record or as objects of a file, or their source (data/records.py); by default the first corpus of
    the model's run. window: layers of a window, by default the paper's share of the depth. samples: draws of the noise
    for each fact. noise: c.
    .data: {value: [N, C]} of the classes of tokens, value_facts [facts, N, C], where the layer is the centre of the window;
    clean, corrupted [facts]; sigma; window; value_p, see above. The intervals of .summary are over facts.
    Raises UserError for records that cannot be read, for prompts that are longer than the table of positions, or if the
    model knows none of them."""
    data = lm.run.data.corpus[0] if data is None else data
    given = records_of(data) if isinstance(data, str) else [read_record(f"record {n}", each) for n, each in enumerate(data)]
    records, prompts = known(lm, given, count)
    window = window or max(1, round(SHARE * reader(lm.config).depth))
    sigma = noise_of(lm, prompts)
    measured = effects(lm, prompts, window, normal(seed, noise * sigma, samples))
    clean_F, corrupted_F = (np.array([getattr(each, name) for each in measured]) for name in ("clean", "corrupted"))
    of_facts = {value: by_class(lm.config, prompts, measured, value) for value in measured[0].restored}
    means = {value: mean_of_known(x_FNC, 0) for value, x_FNC in of_facts.items()}
    summary = {"P(clean)": mean_interval(clean_F), "P(corrupted)": mean_interval(corrupted_F)}
    summary["total effect"] = mean_interval(clean_F - corrupted_F)
    for value, mean_NC in means.items():
        layer, token = np.unravel_index(np.nanargmax(mean_NC), mean_NC.shape)
        summary[f"{value}, layer {layer}, {CLASSES[token]}"] = mean_interval(of_facts[value][:, layer, token])
    facts = {f"{value}_facts": x_FNC for value, x_FNC in of_facts.items()} | {"clean": clean_F, "corrupted": corrupted_F}
    of_subject = {value: x_FNC for value, x_FNC in of_facts.items() if of_prompt(lm.config, value)}
    facts |= {f"{value}_p": np.asarray(stands_out(x_FNC)) for value, x_FNC in of_subject.items()}
    drawn = f"{samples} draws of noise of {noise:g} x {sigma:.3g}"
    line = f"{len(records)} facts, {drawn}, windows of {window} of {reader(lm.config).depth} layers; step {lm.step}"
    pictures = (*_pictures(means), *_example(lm, prompts[0], measured[0]))
    p_values = [(value, float(f"{facts[f'{value}_p']:.2g}")) for value in of_subject]
    last = Table("Does the last token of the subject stand out?", "one-sided paired t test", ("value", "p"), p_values)
    tables = (_classes_table(of_facts), last, _facts_table(records, clean_F, corrupted_F))
    return Result("trace", line, lm.step, means | facts | {"sigma": sigma, "window": window}, summary, pictures, tables)


def known(lm, records: list[Record], count: int) -> tuple[list[Record], list[Prompt]]:
    """The first `count` records whose object's first token is the model's most likely one, and their tokens. Raises
    UserError if there are none, or for a prompt that is longer than the table of positions."""
    found: list[tuple[Record, Prompt]] = []
    with stage("facts that the model knows", count, "facts") as progress:
        for first in range(0, len(records), READ):
            some = records[first : first + READ]
            prompts = [prompt_of(lm, record) for record in some]
            check_fit(lm.config, prompts)
            filled = prompts + prompts[-1:] * (READ - len(prompts))
            token_B = np.asarray(_likeliest(lm.config, lm.params, *read(lm, filled)))[: len(prompts)]
            new = [(r, p) for r, p, token in zip(some, prompts, token_B, strict=True) if token == p.target[0]]
            progress.update(len(new[: count - len(found)]))
            found += new[: count - len(found)]
            if len(found) == count:
                break
    if not found:
        text = f"the model predicts the object of none of the {len(records)} facts: there is nothing to trace"
        raise NothingMeasured(text)
    return [record for record, _ in found], [prompt for _, prompt in found]


@partial(jax.jit, static_argnums=0)
def _likeliest(model: ModelConfig, params: dict, rows: Sequences, last_B):
    lm, out = passed(model, params, rows)
    return lm.logits(out.hidden_BLD[jnp.arange(len(last_B)), last_B][:, None])[:, 0].argmax(-1)


def noise_of(lm, prompts: list[Prompt]) -> float:
    """sigma: the standard deviation of the subjects' token embeddings, as they get the noise: after the embedding's norm."""
    tokens = np.concatenate([prompt.tokens[prompt.first : prompt.last + 1] for prompt in prompts])
    bound = transformer.bind(lm.config, lm.params)
    stack = bound.encoder or bound
    scales = {"none": 1.0, "sqrt_width": stack.config.width**0.5}
    learned = stack.embedding_scale
    scale = scales[stack.config.embedding_scale] if learned is None else float(learned[...])
    rows_ND = np.asarray((stack.embed or bound.embed).table[...])[tokens] * scale
    normed_ND = stack.embedding_norm(jnp.asarray(rows_ND))
    return float(np.asarray(normed_ND, np.float64).std())


def token_class(prompt: Prompt) -> np.ndarray:
    """[L]: the class of each token, an index of CLASSES; -1 before the subject."""
    at_L = np.arange(len(prompt.tokens))
    class_L = np.where(at_L < prompt.first, -1, 4)
    class_L[prompt.first : prompt.last] = 1
    class_L[prompt.first] = 0
    class_L[at_L == prompt.last + 1] = 3
    class_L[-1] = 5
    class_L[prompt.last] = 2
    return class_L


def by_class(model: ModelConfig, prompts: list[Prompt], measured: list[Effects], value: str) -> np.ndarray:
    """[F, N, C]: the indirect effects of a value, averaged over the tokens of a class; NaN for a class without tokens. The
    start id, from which a decoder beside an encoder predicts, is the last token."""
    with_subject = of_prompt(model, value)
    parts = []
    for prompt, each in zip(prompts, measured, strict=True):
        class_L = token_class(prompt) if with_subject else np.array([CLASSES.index("last")])
        effect_NL = each.restored[value] - each.corrupted
        columns = [mean_of_known(effect_NL[:, class_L == number], 1) for number in range(len(CLASSES))]
        parts.append(np.stack(columns, 1))
    return np.stack(parts)


def stands_out(x_FNC: np.ndarray, number: int = CLASSES.index("last subject")) -> float:
    """The p-value of a class of tokens, see above, from effects [facts, N, C]; NaN for too few facts."""
    from scipy import stats

    mean_NC = mean_of_known(x_FNC[::2], 0)
    known = [c for c in range(len(CLASSES)) if np.isfinite(mean_NC[:, c]).any()]
    best_FC = {c: x_FNC[1::2, int(np.nanargmax(mean_NC[:, c])), c] for c in known}
    p_values = []
    for other in set(known) - {number} if number in known else ():
        change_F = best_FC[number] - best_FC[other]
        change_F = change_F[np.isfinite(change_F)]
        if len(change_F) > 1:
            p_values.append(float(stats.ttest_1samp(change_F, 0.0, alternative="greater").pvalue))
    return max(p_values, default=np.nan)


def _pictures(means: dict[str, np.ndarray]) -> list[HeatMap]:
    caption = "mean indirect effect of restoring it at a layer and a class of tokens"
    most = max(float(np.nanmax(mean_NC)) for mean_NC in means.values())
    low = min(0.0, *(float(np.nanmin(mean_NC)) for mean_NC in means.values()))
    return [HeatMap(value, caption, mean_NC, "layer", "token", low, most, CLASSES) for value, mean_NC in means.items()]


def _example(lm, prompt: Prompt, measured: Effects) -> list[HeatMap]:
    """One fact, token by token, as in the paper's figure 1."""
    texts = tuple(f"{text}{'*' * (prompt.first <= n <= prompt.last)}" for n, text in enumerate(_texts(lm, prompt.tokens)))
    answer = _texts(lm, prompt.target[:1])[0]
    caption = f"probability of '{answer}', clean {measured.clean:.3f}, corrupted {measured.corrupted:.3f}; * the subject"
    return [
        HeatMap(
            *(f"First fact, {value}", caption, p_NL, "layer", "token", 0.0, max(measured.clean, 1e-9)),
            names=texts if of_prompt(lm.config, value) else ("start",),
        )
        for value, p_NL in measured.restored.items()
    ]


def _texts(lm, tokens) -> list[str]:
    return [shown(lm.tokenizer, [token]) for token in tokens]


def _classes_table(of_facts: dict[str, np.ndarray]) -> Table:
    """The best layer of each value and class."""
    lines = []
    for value, x_FNC in of_facts.items():
        for number, name in enumerate(CLASSES):
            mean_N = mean_of_known(x_FNC[:, :, number], 0)
            if np.isfinite(mean_N).any():
                layer = int(np.nanargmax(mean_N))
                x_F = x_FNC[:, layer, number]
                mean, half = mean_interval(x_F)
                lines.append((value, name, layer, mean, half, int(np.isfinite(x_F).sum())))
    titles = ("value", "token", "best layer", "indirect effect", "+-", "facts")
    return table("Where restoring helps most", f"mean over facts; {PLUS_MINUS}", titles, lines)


def _facts_table(records: list[Record], clean_F, corrupted_F, shown_facts: int = 12) -> Table:
    lines = [(each.text, each.target, *p) for each, *p in zip(records, clean_F, corrupted_F, strict=True)][:shown_facts]
    caption = f"the first {len(lines)} of {len(records)}"
    return table("Facts", caption, ("prompt", "object", "P(clean)", "P(corrupted)"), lines)
