"""Which options of a model something reads. An option that is set where nothing reads it is an error, since setting it
would change nothing; tests/contracts/test_options.py tries each of them. No JAX here: configs are checked without it.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from xfresearch.errors import require
from xfresearch.models.layouts import LAYOUTS, norm_kind
from xfresearch.models.sizes import has_heads, softmax_slots
from xfresearch.models.variants import ACTIVATIONS


class Reader(NamedTuple):
    """Options and where they are read: `paths`, with * for any ending, are read where `reads` is true."""

    paths: str  # separated by spaces
    reads: Callable  # (block, model) -> bool
    where: str  # the same in words

    def names(self, path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in self.paths.split())


def _has_feed_forward(block, model) -> bool:
    return any(s.name == "feed_forward" for s in LAYOUTS[block.layout].sublayers)


def _activation(block):
    f = block.feed_forward
    return ACTIVATIONS[f.moe.expert if f.kind == "moe" else f.kind]


def _sites(block) -> list[tuple[str, str]]:
    """(name, kind of its norm) of each site that the block's layout has."""
    sites = [(s.name, place) for s in LAYOUTS[block.layout].sublayers for place in s.norms]
    return [(f"{name}_{place}", norm_kind(block, name, place)) for name, place in sites]


def _norms(block, model) -> set[str]:
    """Kinds of all norms that are made as the block's options say: at its sites, inside its sublayers, and, of the first
    block, after the embedding and before the head."""
    a, kinds = block.attention, {kind for _, kind in _sites(block)}
    kinds.add({"softmax": a.qk_norm, "lambda": a.lambdas.norm}.get(a.kind, "none"))
    if model.blocks[model.pattern[0]] is block:
        kinds |= {model.embedding_norm, model.final_norm}
    return kinds - {"none"}


def _solu(block, model) -> bool:
    return _has_feed_forward(block, model) and block.feed_forward.kind == "solu"


def _has_epsilon(block, model) -> bool:
    return bool(_norms(block, model) & {"layer", "rms", "scale"}) or _solu(block, model)


def _dyt_in_attention(block, model) -> bool:
    return any(kind == "dyt" and site.startswith("attention") for site, kind in _sites(block))


def attention(*names: str) -> str:
    return " ".join(f"attention.{name}" for name in names)


SOFTMAX_ALONE = attention("key", "value", "position", "rope.*", "t5_*", "qk_norm*", "clip", "rank", "shaping", "kernel")
SOFTMAX_ALONE += " " + attention("sees_itself", "window", "span*", "trimmed")
TWO_KINDS = attention("query", "output", "bias", "scale", "softcap", "memory_*", "dropout")
HEADS = attention("heads", "kv_heads", "head_size", "query", "output", "scale", "softcap", "memory_heads", "dropout")

READERS = (
    Reader("norm", lambda b, m: any(not getattr(b.norms, s) for s, _ in _sites(b)), "a site that norms does not set"),
    Reader("norm_gain norm_bias", lambda b, m: bool(_norms(b, m)), "a norm"),
    Reader("norm_cast", lambda b, m: bool(_norms(b, m)) or _solu(b, m), "a norm"),
    Reader("norm_offset", lambda b, m: bool(_norms(b, m)) and b.norm_gain, "norms with a gain"),
    Reader("norm_bare", lambda b, m: b.norm_gain or b.norm_bias, "norms with a gain or bias"),
    Reader("norm_epsilon", _has_epsilon, "a norm of kind layer, rms or scale"),
    Reader("norm_alpha", lambda b, m: "dyt" in _norms(b, m), "a norm of kind dyt"),
    Reader("norm_alpha_attention", _dyt_in_attention, "a norm of kind dyt at attention's sites"),
    Reader("branch_gain", lambda b, m: any(s.gain == "small" for s in LAYOUTS[b.layout].sublayers), "a skipless layout"),
    Reader(SOFTMAX_ALONE, lambda b, m: b.attention.kind == "softmax", "kind='softmax'"),
    Reader(TWO_KINDS, lambda b, m: b.attention.kind in ("softmax", "slots"), "kind='softmax' or 'slots'"),
    Reader(HEADS, lambda b, m: has_heads(b.attention), "attention with heads (not kind='slots' of the model's width)"),
    Reader("attention.lambdas.*", lambda b, m: b.attention.kind == "lambda", "kind='lambda'"),
    Reader("attention.rank", lambda b, m: b.attention.query == "merged", "query='merged'"),
    Reader(attention("clip", "qk_norm"), lambda b, m: b.attention.query != "merged", "query other than 'merged'"),
    Reader("attention.qk_norm_over", lambda b, m: b.attention.qk_norm != "none", "qk_norm other than 'none'"),
    Reader("attention.rope.*", lambda b, m: b.attention.position == "rope", "position='rope'"),
    Reader("attention.rope.factor", lambda b, m: b.attention.rope.scaling != "none", "rope.scaling other than 'none'"),
    Reader(
        attention("rope.low_frequency", "rope.high_frequency", "rope.original_length"),
        lambda b, m: b.attention.rope.scaling in ("llama3", "yarn"),
        "rope.scaling='llama3' or 'yarn'",
    ),
    Reader("attention.rope.attention_factor", lambda b, m: b.attention.rope.scaling == "yarn", "rope.scaling='yarn'"),
    Reader("attention.t5_*", lambda b, m: b.attention.position == "t5", "position='t5'"),
    Reader("attention.memory_activation", lambda b, m: b.attention.memory_slots > 0, "memory_slots above 0"),
    Reader("attention.memory_heads", lambda b, m: softmax_slots(b.attention) > 0, "memory_slots in the softmax"),
    Reader(attention("span_*", "trimmed"), lambda b, m: b.attention.span == "adaptive", "span='adaptive'"),
    Reader("feed_forward.*", _has_feed_forward, "a layout with a feed-forward"),
    Reader("feed_forward.bias", lambda b, m: b.feed_forward.kind != "moe", "a kind other than 'moe'"),
    Reader("feed_forward.gated_hidden", lambda b, m: _activation(b).gated, "a gated kind"),
    Reader("feed_forward.moe.*", lambda b, m: b.feed_forward.kind == "moe", "kind='moe'"),
    Reader("feed_forward.moe.balance_loss", lambda b, m: b.feed_forward.moe.balance == "loss", "moe.balance='loss'"),
    Reader("feed_forward.moe.bias_speed", lambda b, m: b.feed_forward.moe.balance == "bias", "moe.balance='bias'"),
)

OF_MODEL = (
    Reader("position_offset", lambda _, m: m.position == "learned", "position='learned'"),
    Reader("init_std", lambda _, m: m.init == "normal", "init='normal'"),
)


def leaves(config, prefix: str = "") -> dict:
    """{dotted path: (value, default)} of every option of a block."""
    found = {}
    for spec in fields(config):
        value, path = getattr(config, spec.name), prefix + spec.name
        if is_dataclass(value):
            found |= leaves(value, path + ".")
        else:
            found[path] = value, spec.default
    return found


def unread(block, model) -> dict[str, str]:
    """{dotted path: where it would be read} of every option that nothing in `block` reads."""
    idle = [reader for reader in READERS if not reader.reads(block, model)]
    return {path: reader.where for reader in reversed(idle) for path in leaves(block) if reader.names(path)}


def check_read(model) -> None:
    """UserError for an option that is set, and that nothing reads."""
    defaults = {spec.name: spec.default for spec in fields(model)}
    for reader in OF_MODEL:
        if not reader.reads(None, model):
            _require_default(reader.paths, getattr(model, reader.paths), defaults[reader.paths], reader.where)
    for name, block in model.blocks.items():
        options = leaves(block)
        for path, where in unread(block, model).items():
            _require_default(f"blocks.{name}.{path}", *options[path], where)


def _require_default(path: str, value, default, where: str) -> None:
    require(value == default, f"model.{path}", value, f"{default!r}, its default, since only {where} reads it")
