"""Models with an encoder and a decoder, which together have every option of cross-attention; their sources, and packed rows
of pairs."""

from dataclasses import replace

import numpy as np

from tests.contracts.variants import BASE, BATCH, LENGTH, MAIN, SHIPPED, change
from xfresearch.models.block_config import BLOCKS
from xfresearch.models.context import Source
from xfresearch.models.encoder import EncoderConfig
from xfresearch.models.feed_forwards.dense import DenseConfig
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.mixers.softmax.cross import CrossConfig
from xfresearch.models.model_config import ModelConfig, resolve_model

SOURCE = 6  # tokens
CROSS = "blocks.main.cross_attention."
ENCODER = "stacks.encoder."
NARROW = {ENCODER + "width": 24, ENCODER + "embedding": "own"}
PRE_NORM = BLOCKS["cross_pre_norm"](
    attention=SoftmaxConfig(heads=4), cross_attention=CrossConfig(heads=4), feed_forward=DenseConfig(hidden=32)
)
STACKS = {"encoder": EncoderConfig(depth=2, max_length=SOURCE, blocks={"main": MAIN})}
TWO = replace(BASE, blocks={"main": PRE_NORM}, stacks=STACKS)
AROUND = {"final_norm": "none", "position": "sinusoidal", "embedding_scale": "sqrt_width"}
POST_NORM = AROUND | {ENCODER + name: value for name, value in AROUND.items()}
POST_NORM |= {"blocks.main.layout": "cross_post_norm", ENCODER + "blocks.main.layout": "post_norm"}


def options(**cross) -> dict:
    return {CROSS + name: value for name, value in cross.items()}


CHANGES: dict[str, dict] = {
    "pre-norm": {},
    "post-norm": POST_NORM,
    "all-attention": {
        "blocks.main.layout": "cross_all_attention",
        "final_norm": "none",
        "blocks.main.attention.memory_slots": 32,
        **options(memory_slots=32, kv_heads=2),
    },
    "merged": NARROW | options(query="merged"),
    "low-rank": options(query="merged", rank=6, bias=("query", "value", "output"), sink="learned"),
    "no-query": options(query="identity_whole", head_size=32, memory_slots=32, memory_heads="shared"),
    "no-key": NARROW | options(key="identity_whole", value="identity_whole", output_gate="head"),
    "key-is-value": options(value="key", qk_norm="rms", clip=0.8, kv_heads=2),
    "heads-normed": options(qk_norm="layer", qk_norm_over="heads", bias=("key",), softcap=2.0, scale=0.2),
    "identities": options(query="identity", key="identity", value="identity_plus", output="identity"),
    "wide-slots": options(memory_slots=32, memory_activation="relu", output_gate="elementwise", sink="off_by_one"),
    "relative": {  # T5's tables, one for the layers of each stack, and its head
        "head_scale": "inverse_sqrt_width",
        "blocks.main.attention.position": "t5",
        ENCODER + "blocks.main.attention.position": "t5",
        ENCODER + "blocks.main.attention.t5_buckets": 8,
        ENCODER + "blocks.main.attention.t5_distance": 5,
    },
    "rotated": {
        "blocks.main.attention.position": "rope",
        ENCODER + "causal": True,
        ENCODER + "blocks.main.attention.position": "rope",
        ENCODER + "blocks.main.attention.window": 3,
        **options(value="identity"),
    },
    "experts": {
        "position": "learned",
        ENCODER + "position": "learned",
        ENCODER + "blocks.main.feed_forward.kind": "moe",
        ENCODER + "segments": ((("main",), 1), (("main",), 1)),
    },
}


def made(changes: dict) -> ModelConfig:
    """A model with two stacks and these changes; layouts and kinds are set first."""
    model = TWO
    for path in sorted(changes, key=lambda path: not path.endswith((".kind", ".layout"))):
        model = change(model, path, changes[path])
    return resolve_model(model)


MODELS = {name: made(changes) for name, changes in CHANGES.items()}
NAMED = {f"configs/{name}.py": change(m, ENCODER + "max_length", SOURCE) for name, m in SHIPPED.items() if m.encoder}
MODELS |= NAMED
# The decoder's layers with cross-attention and those without it take turns.
MODELS["in-turns"] = resolve_model(replace(TWO, blocks={"self": MAIN, "both": PRE_NORM}, pattern=("self", "both")))


def source_for(config: ModelConfig, batch: int = BATCH, length: int = SOURCE) -> Source:
    """A source without padding."""
    return Source(np.random.default_rng(11).integers(0, config.vocab_size, (batch, length)).astype(np.int32))


def packed(config: ModelConfig) -> dict:
    """Arguments of a context: two pairs and padding in each row, of other lengths in each, in both sequences."""
    source = source_for(config)
    splits = [(SOURCE - 3 - row % 2, 2) for row in range(BATCH)]
    targets = [(LENGTH // 2 + row % 3, LENGTH - LENGTH // 2 - 4) for row in range(BATCH)]
    segments_BS, positions_BS = _rows(splits, SOURCE)
    segments_BL, positions_BL = _rows(targets, LENGTH)
    return {
        "source": Source(source.tokens_BS, segments_BS, positions_BS),
        "segments_BL": segments_BL,
        "positions_BL": positions_BL,
    }


def _rows(lengths: list[tuple[int, int]], whole: int) -> tuple[np.ndarray, np.ndarray]:
    rows = [[1] * first + [2] * second + [0] * (whole - first - second) for first, second in lengths]
    positions = [[*range(first), *range(second), *range(whole - first - second)] for first, second in lengths]
    return np.array(rows, np.int32), np.array(positions, np.int32)
