"""Which value, at which layer and token, carries the difference between two prompts.

The model reads a clean and a corrupted prompt of equal length. The metric is the logit of the clean answer minus that of the
corrupted one, at the last token. An effect is the change of the metric, relative to that between the two prompts: 1 restores
the clean one.

    activation   the corrupted pass with one value [layer, token] from the clean pass (Meng et al. 2022; Vig et al. 2020)
    attribution  its linear approximation, gradient of the metric times difference, from one backward pass (Nanda 2023)
    path         the corrupted pass in which what one sublayer writes reaches one receiver as in the clean pass, directly:
                 all sublayers between write what they write in the corrupted pass (Wang et al. 2022)

With an encoder the prompts are two sources, of equally many tokens, and the beginnings of two targets. Sites of the encoder
begin with `encoder.`, and are patched at a token of the source. Paths are those of the decoder's stream: what the encoder
writes reaches it through cross-attention alone, which is a sublayer of the decoder.

The layers and tokens of a site are one batch of one compiled program, which serves all prompts of a length and all answers.
"""

from functools import partial
from itertools import groupby, takewhile

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis.passes import about
from xfresearch.analysis.registry import analysis
from xfresearch.analysis.result import Result
from xfresearch.analysis.sequences import Sequences, passed
from xfresearch.analysis.tap_vectors import stack_of
from xfresearch.analysis.token_text import shown
from xfresearch.models import layers
from xfresearch.models.inputs import matching, tap_shapes
from xfresearch.models.model_config import ModelConfig, predicts_next
from xfresearch.models.sources import source_of, target_ids
from xfresearch.models.taps import ENCODER, Patch, Request, Stacked, address, in_stack, of_encoder
from xfresearch.pages.figures import HeatMap, Table, table
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.progress import stage

TOGETHER = 16  # patched passes at a time


@analysis(predicts_next, "which values carry the difference between two prompts", prompts=True)
def patching(
    lm, clean=None, corrupted=None, answers=None, sites: tuple[str, ...] = (), receiver: str = "final", source=None
) -> Result:
    """The effects of patching values of the clean prompt into the corrupted one.

    clean, corrupted: texts, or token ids [1, L], of equally many tokens; with an encoder the beginnings of the targets, ''
    by default, and source: two sources, the clean one first, of equally many tokens too. answers: ids of the clean and of
    the corrupted answer, or texts of one token; by default the tokens whose logits rise and fall most from the corrupted to
    the clean prompt. sites: such as 'attention.out' or 'encoder.attention.out'; by default the residual stream after each
    block and what each sublayer writes. receiver: of the direct paths, a sublayer such as 'blocks.3.attention', or 'final',
    which the head reads. .data: {site: [N, L], attribution/site: [N, L]}, with the layers and tokens of the encoder for its
    sites, NaN for layers without the site; paths [N, sublayers] to the receiver, NaN for sublayers that are not before it;
    clean, corrupted: the metric; correlation/site of exact effects and attribution. Raises UserError if the prompts or the
    answers are equal, or for a receiver that the model does not have."""
    tokens = two_prompts(lm, clean, corrupted, source)
    answers = two_answers(lm, tokens, answers)
    _require_tokens(lm.config, sites)
    sites = sites or default_sites(lm.config)
    metrics = [float(_metric(lm.config, lm.params, each, np.array(answers), Request())[0]) for each in tokens]
    if metrics[0] == metrics[1]:
        raise UserError(f"both prompts have the same difference of logits of {answers}: patching has nothing to explain")
    data: dict[str, np.ndarray | float] = {"clean": metrics[0], "corrupted": metrics[1]}
    with stage("patching", len(sites), "sites") as progress:
        for site in sites:
            exact = effects(lm, tokens[0], tokens[1], site, answers)
            linear = attribution(lm, tokens[0], tokens[1], site, answers)
            span = metrics[0] - metrics[1]
            effect, attributed = (exact - metrics[1]) / span, linear / span
            data[site], data[f"attribution/{site}"] = effect, attributed
            both = np.isfinite(exact)
            pair = effect[both], attributed[both]
            data[f"correlation/{site}"] = float(np.corrcoef(*pair)[0, 1]) if pair[0].std() and pair[1].std() else np.nan
            progress.update(1)
    direct = (paths(lm, tokens[0], tokens[1], receiver, answers) - metrics[1]) / (metrics[0] - metrics[1])
    summary = {name: (value, np.nan) for name, value in data.items() if isinstance(value, float)}
    data["paths"] = direct
    line = about(lm, tokens[1], tokens[1])
    texts = {site: [shown(lm.tokenizer, [each]) for each in stack_of(tokens[1], site).tokens_NL[0]] for site in sites}
    pictures = (*_pictures(data, texts), _paths_picture(lm.config, direct, receiver))
    return Result("patching", line, lm.step, data, summary, pictures, (_table(data, texts),))


def two_prompts(lm, clean, corrupted, source) -> list[Sequences]:
    """The clean and the corrupted prompt, each a row, with its source. Raises UserError for different numbers of tokens."""
    if lm.config.encoder is None:
        source_of(lm.config, lm.tokenizer, source, 0)  # its error
        if clean is None or corrupted is None:
            raise UserError("clean and corrupted are missing: patching needs two prompts")
        rows = [Sequences(np.asarray(lm.tokens(prompt))) for prompt in (clean, corrupted)]
    else:
        if source is None or len(source) != 2:
            raise UserError("source is missing: it must be two sources, the clean and the corrupted one")
        rows = [_with_source(lm, *both) for both in zip((clean, corrupted), source, strict=True)]
    for each in zip(*(jax.tree.leaves(row) for row in rows), strict=True):
        if each[0].shape != each[1].shape or len(each[0]) != 1:
            shapes = " and ".join(str(tokens.shape) for tokens in each)
            raise UserError(f"prompts of {shapes} tokens are not allowed: both must be one row of equally many tokens")
    return rows


def _with_source(lm, prompt, source) -> Sequences:
    """A row of the beginning of a target, '' or None for the start alone, and its source."""
    prompt = "" if prompt is None else prompt
    ids = [target_ids(lm.config, lm.tokenizer, prompt)] if isinstance(prompt, str) else lm.tokens(prompt)
    read = source_of(lm.config, lm.tokenizer, source if isinstance(source, str) else np.atleast_2d(source), 1)
    return jax.tree.map(np.asarray, Sequences(np.asarray(ids, np.int32), source=read))


def two_answers(lm, tokens: list[Sequences], answers) -> tuple[int, int]:
    """The ids of the two answers. Raises UserError for a text of several tokens, for equal answers, or for prompts with
    equal logits."""
    if answers is None:
        clean_V, corrupted_V = (np.asarray(lm(**each.arguments()))[0, -1] for each in tokens)
        if (clean_V == corrupted_V).all():
            raise UserError("both prompts have the same logits: patching has nothing to explain")
        return int((clean_V - corrupted_V).argmax()), int((clean_V - corrupted_V).argmin())
    if isinstance(answers, str):
        raise UserError(f"answers={answers!r} is not allowed: it must be two tokens, each a text or an id")
    if lm.tokenizer is None and any(isinstance(answer, str) for answer in answers):
        raise UserError(f"answers={answers!r} is not allowed: this model has no tokenizer; give two ids")
    ids: list = []
    for answer in answers:
        of_answer = lm.tokenizer.encode(answer.encode()).tolist() if isinstance(answer, str) else [int(answer)]
        if len(of_answer) != 1:
            raise UserError(f"answer {answer!r} is not allowed: it must be one token, and it is {len(of_answer)}")
        ids += of_answer
    if len(ids) != 2 or ids[0] == ids[1] or not all(0 <= each < lm.config.vocab_size for each in ids):
        raise UserError(f"answers={answers!r} is not allowed: it must be two different tokens")
    return ids[0], ids[1]


def _require_tokens(model: ModelConfig, sites: tuple[str, ...]) -> None:
    """Raises UserError for a site whose values have no axis of tokens behind that of rows, as those of all heads."""
    shapes = [tap_shapes(model, 1, length, length) for length in (2, 3)] if sites else []
    for name in shapes[0] if sites else ():
        site = name.removesuffix(in_stack(name)) + in_stack(name).split(".", 2)[-1]
        if site in sites and [each[name].shape[1:2] for each in shapes] != [(2,), (3,)]:
            raise UserError(f"sites={site!r} is not allowed: it must have a value of each token")


def default_sites(model: ModelConfig) -> tuple[str, ...]:
    """The residual stream after each block, and what each sublayer writes; those of an encoder first."""
    encoder = getattr(model, ENCODER, None)
    sites = [f"{ENCODER}.{site}" for site in default_sites(encoder)] if encoder else []
    for number in {layer.block: layer.number for layer in layers.layers(model)}.values():  # a layer of each block
        names = [each.name for each in model.sublayers(layer=number)]
        sites += [f"{names[-1]}.residual", *(f"{name}.out" for name in names)]
    return tuple(dict.fromkeys(sites))


def effects(lm, clean: Sequences, corrupted: Sequences, site: str, answers) -> np.ndarray:
    """[N, L]: the metric of the corrupted pass with the value of each layer and token from the clean one."""
    effect_NL = _unknown(lm.config, clean, site)
    length = effect_NL.shape[1]
    for stack, numbers in stacks_of(lm.config, site).items():
        cases = [(r, position) for r in range(len(numbers)) for position in range(length)]
        pad = -len(cases) % TOGETHER
        layer_C, position_C = np.array([*cases, *cases[:1] * pad]).T
        own = in_stack(site)
        arguments = (lm.config, stack, own, length, lm.params, clean, corrupted, np.array(answers), layer_C, position_C)
        metrics_C = np.asarray(_patched(*arguments), np.float64)[: len(cases)]
        effect_NL[numbers] = metrics_C.reshape(len(numbers), length)
    return effect_NL


def attribution(lm, clean: Sequences, corrupted: Sequences, site: str, answers) -> np.ndarray:
    """[N, L]: the linear approximation of the change of the metric by each value of the clean pass."""
    effect_NL = _unknown(lm.config, clean, site)
    for stack, numbers in stacks_of(lm.config, site).items():
        arguments = (lm.config, stack, in_stack(site), lm.params, clean, corrupted, np.array(answers))
        effect_NL[numbers] = np.asarray(_linear(*arguments), np.float64)
    return effect_NL


def _unknown(model: ModelConfig, rows: Sequences, site: str) -> np.ndarray:
    """NaN for each layer and token of the stack of a site."""
    depth = model.encoder.depth if model.encoder and of_encoder(site) else model.depth
    return np.full((depth, stack_of(rows, site).tokens_NL.shape[1]), np.nan)


def paths(lm, clean: Sequences, corrupted: Sequences, receiver: str, answers) -> np.ndarray:
    """[N, sublayers]: the metric if what each earlier sublayer writes reaches `receiver`, a sublayer such as
    'blocks.3.attention' or 'final', directly as in the clean pass; NaN for later ones. The order of sublayers is that of the
    block. A later sublayer that reads the receiver's input, as in a parallel block, reads that of the corrupted pass."""
    own = [name for name in tap_shapes(lm.config) if not of_encoder(name)]
    senders = [name.removesuffix(".out") for name in own if name.endswith(".out")]
    if receiver not in (*senders, "final"):
        of = "a sublayer of the decoder" if lm.config.encoder else "a sublayer"
        raise UserError(f"receiver={receiver!r} is not allowed: it must be final or {of}, such as blocks.0.attention")
    senders = senders[: senders.index(receiver)] if receiver != "final" else senders
    names = [f"{name}.out" for name in senders]

    def values(rows: Sequences, names, replace=None) -> dict:
        return lm.capture(names=names, replace=replace, **rows.arguments()) if names else {}

    of_clean, of_corrupted = values(clean, names), values(corrupted, names)
    beside = readers_beside(lm.config, receiver)
    kept = values(corrupted, beside) if names else {}
    columns = _columns(lm.config)
    difference_NC = np.full((lm.config.depth, max(columns.values()) + 1), np.nan)
    with stage(f"paths to {receiver}", len(names), "sublayers") as progress:
        for name in names:
            fixed = of_corrupted | {name: of_clean[name]}
            read = values(corrupted, "final" if receiver == "final" else f"{receiver}.in", replace=fixed)
            logits_BLV = np.asarray(lm(replace=read | kept, **corrupted.arguments()), np.float64)
            path, logits_V = name.removesuffix(".out"), logits_BLV[0, -1]
            difference_NC[int(path.split(".")[1]), columns[path]] = logits_V[answers[0]] - logits_V[answers[1]]
            progress.update(1)
    return difference_NC


def _columns(model: ModelConfig) -> dict[str, int]:
    """{path of a sublayer: its number in the block}, in the stack that the head reads."""
    of_layers = groupby((each for each in model.sublayers() if not each.prefix), lambda each: each.layer)
    return {each.path: column for _, sublayers in of_layers for column, each in enumerate(sublayers)}


def readers_beside(model: ModelConfig, receiver: str) -> list[str]:
    """The taps of the inputs of other sublayers that the block makes of the receiver's input."""
    if receiver == "final":
        return []
    sublayers = model.sublayers(layer=int(receiver.split(".")[1]))
    after = sublayers[[each.path for each in sublayers].index(receiver) + 1 :]
    return [f"{each.path}.in" for each in takewhile(lambda each: each.connection.reads == "before", after)]


def stacks_of(model: ModelConfig, site: str) -> dict[str, list[int]]:
    """{stack: numbers of its layers} of the stacks that have a site. Raises UserError if none has it."""
    own = in_stack(site)
    taps = [tap for tap, _ in matching(model, [f"{site.removesuffix(own)}blocks.*.{own}"]).values()]
    by_stack: dict[str, list[int]] = {}
    for number, stack in sorted((int(in_stack(tap).split(".")[1]), address(model, tap)[0]) for tap in taps):
        by_stack.setdefault(stack, []).append(number)
    return by_stack


@partial(jax.jit, static_argnums=0)
def _metric(model: ModelConfig, params: dict, rows: Sequences, answers, taps: Request):
    """[B]: the logit of the first answer minus that of the second one, at the last token."""
    lm, out = passed(model, params, rows, taps)
    logits_BV = lm.logits(out.hidden_BLD[:, -1:])[:, 0]
    return logits_BV[:, answers[0]] - logits_BV[:, answers[1]]


def _values(model: ModelConfig, stack: str, site: str, params: dict, rows: Sequences):
    """[R, B, L, ...]: the values of a site in the layers of a stack."""
    return passed(model, params, rows, Request(frozenset({(stack, site)})))[1].captures[stack][site]


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _patched(model, stack: str, site: str, length: int, params, clean, corrupted, answers, layer_C, position_C):
    """[C]: the metric of each case: the value of a layer of the stack, at a position, from the clean pass. length: of the
    sequence that the stack reads."""
    value_RBL = _values(model, stack, site, params, clean)
    number_R = jnp.arange(len(value_RBL))

    def case(chosen):
        layer, position = chosen
        where_RBL = jnp.broadcast_to(jnp.arange(length) == position, (len(number_R), 1, length))
        slots_R = jnp.where(number_R == layer, number_R, -1)
        patch = Stacked(Patch(arguments=(value_RBL,), where=where_RBL), slots_R)
        return _metric(model, params, corrupted, answers, Request(patches={stack: {site: (patch,)}}))[0]

    return jax.lax.map(case, (layer_C, position_C), batch_size=TOGETHER)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _linear(model, stack: str, site: str, params, clean, corrupted, answers):
    """[R, L]: gradient of the metric for the values of the stack's layers, times their difference."""
    clean_RBL, value_RBL = (_values(model, stack, site, params, each) for each in (clean, corrupted))

    def metric(shift_RBL):
        patch = Stacked(Patch(jnp.add, (shift_RBL,)), jnp.arange(len(shift_RBL)))
        return _metric(model, params, corrupted, answers, Request(patches={stack: {site: (patch,)}}))[0]

    slopes_RBL = jax.grad(metric)(jnp.zeros_like(value_RBL))
    products = slopes_RBL * (clean_RBL - value_RBL)
    return products.sum([axis for axis in range(products.ndim) if axis not in (0, 2)])


def _pictures(data: dict, texts: dict[str, list[str]]) -> tuple[HeatMap, ...]:
    caption = "effect of patching at a token of the corrupted prompt: 1 restores the clean prompt's metric"
    return tuple(HeatMap(site, caption, data[site], "layer", "token", -1.0, 1.0, tuple(of)) for site, of in texts.items())


def _paths_picture(model: ModelConfig, paths, receiver: str) -> HeatMap:
    names = {tuple(block.sublayers) for block in model.blocks.values()}
    columns = names.pop() if len(names) == 1 else ()
    caption = "effect of what a sublayer writes on the receiver alone"
    return HeatMap(f"Direct paths to {receiver}", caption, paths, "layer", "sublayer", -1.0, 1.0, columns)


def _table(data: dict, texts: dict[str, list[str]]) -> Table:
    """The strongest effects of each site."""
    lines = []
    for site, of in texts.items():
        best = np.argsort(-np.abs(np.nan_to_num(data[site])).ravel())[:3]
        strongest = [divmod(int(at), len(of)) for at in best]
        cells = [f"{layer}, {at} '{of[at]}': {data[site][layer, at]:.3f}" for layer, at in strongest]
        lines.append((site, *cells, data[f"correlation/{site}"]))
    titles = ("site", "1", "2", "3", "correlation with attribution patching")
    return table("Strongest effects", "layer, token of the corrupted prompt: effect", titles, lines)
