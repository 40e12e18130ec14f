"""The reference model in NumPy float64: slow loops, written from the papers' equations and not from our code.

`p` holds the parameters of one layer: a nested dict of arrays, as `transformer.init` returns it. Each function takes
one sequence. `passed` has the values of all taps.
"""

import math
from dataclasses import replace

import numpy as np

from tests.reference.cross import cross_attention
from tests.reference.feed_forward import dense
from tests.reference.norms import norm_of, softcap
from tests.reference.part import Part
from tests.reference.records import at, record, recording
from tests.variants import ACTIVATIONS, FEED_FORWARDS, LAYOUTS, MIXERS
from tests.variants.case import Sequence

# Positions added to the embedding. Vaswani et al. 2017, sec. 3.5.


def sinusoidal(positions, width):
    table = np.zeros((len(positions), width))
    for row, position in enumerate(positions):
        for i in range(width):
            angle = position / 10_000 ** (2 * (i // 2) / width)
            table[row, i] = math.cos(angle) if i % 2 else math.sin(angle)
    return table


def block(p, x_LD, config, positions, segments, model_config, shared, layer):
    """x_LD after one block, and its auxiliary losses."""
    losses = {}
    real = np.asarray(segments) > 0

    def attend(name, options, x):
        longest = getattr(options, "window", 0) or model_config.max_length
        if getattr(options, "span", "full") == "adaptive":
            mean = np.mean(p[name]["span"]["fraction"]) * longest
            losses["span_loss"] = options.span_loss * mean * real.sum()
        sequence = Sequence(positions, segments, model_config.causal, layer, longest, shared)
        return MIXERS[options.kind].reference(p[name], x, config, sequence)

    def feed(name, options, x):
        if options.kind in ACTIVATIONS:
            return dense(p[name], x, options.kind, config.norm_epsilon)
        y, more = FEED_FORWARDS[options.kind].reference(p[name], x, options, config, segments, model_config)
        for loss, value in more.items():
            losses[loss] = losses.get(loss, 0) + value
        return y

    def cross(name, options, x):
        return cross_attention(p[name], x, config, segments, shared["source"])

    def part(name, options):
        function = {"attention": attend, "cross_attention": cross}.get(name, feed)
        return Part(name, lambda x: function(name, options, x))

    def norm(name):
        kind, own, options = site(config, p, name)
        return lambda x: norm_of(kind, own, x, options)

    norms = {name: norm(name) for name in vars(config.norms)}
    parts = [part(name, options) for name, options in config.sublayers.items()]
    x_LD = LAYOUTS[config.layout].reference(x_LD, *parts, norms, p | {"carried": shared}, model_config.depth)
    return x_LD, losses


def site(config, p, name):
    """The kind, the parameters and the options of the norm at a site of a block, such as 'attention_post'."""
    sublayer, place = name.rsplit("_", 1)
    own = getattr(config.norms, name)
    epsilon = config.norm_epsilon if own.epsilon is None else own.epsilon
    return own.kind or config.norm, p.get(f"{sublayer}_norm_{place}", {}), replace(config, norm_epsilon=epsilon)


def layer_order(config):
    """(block, name of the stack in the parameters, index in the stack) of each layer. Repeated names get a number."""
    segments = config.segments or ((config.pattern, config.depth // len(config.pattern)),)
    names = [name for pattern, _ in segments for name in pattern]
    order = []
    start = 0
    for pattern, repeats in segments:
        for repeat in range(repeats):
            for i, name in enumerate(pattern):
                order.append((name, name if names.count(name) == 1 else f"{name}_{start + i}", repeat))
        start += len(pattern)
    return order


def model(config, params, tokens, positions=None, segments=None, source=None, types=None, prefix=None):
    """Logits [L, V] of one sequence of token ids, and its auxiliary losses, summed over layers. source: the token ids, the
    positions and the segments of the source of a model with an encoder. types, prefix: of each token."""
    shared = dict(params.get("shared", {}))  # and values that travel between layers, the source, and the prefix
    shared |= {} if prefix is None else {"prefix": prefix}
    losses = {}
    if source is not None:
        own = params["encoder"]
        with at("encoder"):
            s_SW, losses = through(config.encoder, {"embed": params["embed"], **own}, dict(own.get("shared", {})), *source)
        shared["source"] = s_SW, source[2]
    x_LD, more = through(config, params, shared, tokens, positions, segments, types)
    losses = {f"encoder/{name}": value for name, value in losses.items()} | more
    scale = {"none": 1, "inverse_sqrt_width": 1 / math.sqrt(config.width)}[config.head_scale]  # T5's released code
    logits_LV = scale * x_LD @ params["embed" if config.tie_embeddings else "head"]["table"].T
    logits_LV += params.get("head_bias", {}).get("bias", 0)
    return softcap(logits_LV, config.logit_softcap), losses


def through(config, params, shared, tokens, positions, segments, types=None):
    """The hidden states [L, D] after a stack, its final norm and the head's layer, and its auxiliary losses."""
    positions = np.arange(len(tokens)) if positions is None else positions
    segments = np.ones(len(tokens)) if segments is None else segments
    order = layer_order(config)
    first = config.blocks[order[0][0]]
    losses = {}
    factor = {"none": 1, "sqrt_width": math.sqrt(config.width), "learned": params.get("embedding_scale")}
    x_LD = params["embed"]["table"][tokens] * factor[config.embedding_scale]
    if config.position == "learned":
        x_LD = x_LD + params["position"]["table"][positions + config.position_offset]
    if "token_type" in params:  # Devlin et al. 2019, fig. 2
        x_LD = x_LD + params["token_type"]["table"][np.zeros(len(tokens), int) if types is None else types]
    if config.position == "sinusoidal":
        x_LD = x_LD + sinusoidal(positions, config.width)
    x_LD = norm_of(config.embedding_norm, params.get("embedding_norm", {}), x_LD, first)
    x_LD = record("embed", x_LD)
    for layer, (name, stack, repeat) in enumerate(order):
        p = pick(params["blocks"][stack], repeat)
        with at(f"blocks.{layer}"):
            x_LD, more = block(p, x_LD, config.blocks[name], positions, segments, config, shared, layer)
        losses = {key: losses.get(key, 0) + more.get(key, 0) for key in losses | more}
    final = lambda x: norm_of(config.final_norm, params.get("final_norm", {}), x, first)  # noqa: E731
    x_LD = LAYOUTS[config.blocks[order[-1][0]].layout].end(x_LD, params | {"carried": shared}, final)
    if "head_layer" in params:  # get_masked_lm_output of the authors' run_pretraining.py
        p = params["head_layer"]
        x_LD = ACTIVATIONS[config.head_activation].reference(x_LD @ p["dense"]["kernel"] + p["dense"]["bias"])
        x_LD = norm_of(config.head_norm, p.get("norm", {}), x_LD, first)
    return record("final", x_LD), losses


def pick(tree, index):
    """Layer `index` of a stack of layers."""
    return {k: pick(v, index) if isinstance(v, dict) else np.asarray(v[index], np.float64) for k, v in tree.items()}


def passed(config, params, tokens_BL, segments_BL=None, positions_BL=None, changes=None, source=None):
    """Logits [B, L, V], and {tap: value [B, ...]} of all taps. changes: {tap: function} of the value of a row. source: a
    Source, or None."""
    params = tree(params)
    rows = []
    for row, tokens in enumerate(tokens_BL):
        segments, positions = (None if each is None else each[row] for each in (segments_BL, positions_BL))
        of_row = None if source is None else [None if source[i] is None else source[i][row] for i in (0, 2, 1)]
        if of_row and of_row[2] is None:
            of_row[2] = np.ones(len(of_row[0]))
        with recording(changes) as values:
            logits_LV, _ = model(config, params, tokens, positions, segments, of_row)
        rows.append((logits_LV, values))
    stacked = {name: np.stack([values[name] for _, values in rows]) for name in rows[0][1]}
    return np.stack([logits for logits, _ in rows]), stacked


def tree(params) -> dict:
    """The parameters as arrays in float64."""
    return {k: tree(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in params.items()}
