"""Random `transformers` models with an encoder and a decoder, and their outputs."""

from itertools import takewhile
from pathlib import Path

import numpy as np
import torch

from tests.parity import hf_torch
from tests.parity.hf_draws import POSITIONS, Draw

START, ENDS = 0, list(range(1, 9))  # ids that a decoder starts from, and that end a text: many, so that some do


def common(draw: Draw) -> dict:
    """Special tokens that are not those of the family's defaults."""
    ids = {"pad_token_id": 0, "eos_token_id": ENDS, "decoder_start_token_id": START, "bos_token_id": None}
    return {"vocab_size": draw.size(51, 99), **ids}


def t5(draw: Draw):
    """v1.0, with the factor before the head, or v1.1 without it. `untied` of a model of v1.1: a head of its own."""
    from transformers import T5Config

    kinds = ("relu", "gated-gelu", "gated-silu", "gelu")
    heads = {"num_heads": draw.pick(1, 3, 5), "d_kv": draw.pick(3, 5, 7)}
    layers = {"num_layers": draw.pick(1, 2, 3), "num_decoder_layers": draw.pick(None, 1, 2)}
    names = ("relative_attention_num_buckets", "relative_attention_max_distance")
    buckets = dict(zip(names, draw.pick((6, 9), (8, 20), (32, 128)), strict=True))
    sizes = {"d_model": draw.size(13, 31), "d_ff": draw.size(31, 75), "layer_norm_epsilon": draw.pick(1e-6, 1e-3)}
    kind = {"feed_forward_proj": draw.pick(*kinds), "tie_word_embeddings": draw.pick(True, False)}
    return T5Config(**common(draw), **heads, **layers, **buckets, **sizes, **kind)


def bart(draw: Draw):
    from transformers import BartConfig

    size, heads = draw.pick(1, 3, 5), draw.pick((3, 5), (5, 3), (1, 15))
    of_stacks = dict(zip(("encoder_attention_heads", "decoder_attention_heads"), heads, strict=True))
    for stack in ("encoder", "decoder"):
        of_stacks |= {f"{stack}_layers": draw.pick(1, 2, 3), f"{stack}_ffn_dim": draw.size(31, 75)}
    choices = {"scale_embedding": draw.pick(True, False)}
    kind = {"activation_function": draw.pick("gelu", "relu", "gelu_new"), "max_position_embeddings": POSITIONS}
    ends = {"forced_eos_token_id": draw.pick(None, ENDS[0]), "forced_bos_token_id": draw.pick(None, 17)}
    return BartConfig(**common(draw), **of_stacks, **choices, **kind, **ends, d_model=15 * size)


DRAWS = {"t5": t5, "bart": bart}


def write_random(config, folder: Path, number: int, dtype: str) -> None:
    """As hf_torch.write_random. The first draw has what some folders have: a head of its own in T5 v1.1, and a
    final_logits_bias that is not 0 in BART."""

    def change(model):
        if number == 0 and config.model_type == "bart":
            model.final_logits_bias = 0.5 * torch.randn_like(model.final_logits_bias)
        if number == 0 and config.model_type == "t5" and not config.scale_decoder_outputs:
            weight = 1.5 * torch.randn(config.vocab_size, config.d_model) / config.d_model**0.5
            model.lm_head.weight = torch.nn.Parameter(weight)

    hf_torch.write_random(config, folder, seed=number, dtype=dtype, change=change)


def inputs(source: list[list[int]]) -> dict:
    """Sources of different lengths, padded on the right."""
    longest = max(map(len, source))
    rows = [[*each, *[0] * (longest - len(each))] for each in source]
    mask = [[1] * len(each) + [0] * (longest - len(each)) for each in source]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def outputs(folder: Path, source: list[list[int]], tokens_BL, dtype: str) -> dict[str, np.ndarray]:
    """Logits, the output of the encoder, and the last layers' residual stream of both stacks."""
    with torch.no_grad(), hf_torch.precision(dtype):
        asked = {"decoder_input_ids": torch.from_numpy(tokens_BL), "output_hidden_states": True, "use_cache": False}
        out = hf_torch.read(folder, dtype)(**inputs(source), **asked)
    of_stacks = {"encoder": out.encoder_hidden_states, "decoder": out.decoder_hidden_states}
    values = {"logits": out.logits, "encoder.final": out.encoder_last_hidden_state}
    for stack, states in of_stacks.items():
        values |= {f"{stack}.{number}": state for number, state in enumerate(states)}
    return {name: hf_torch.on_host(value) for name, value in values.items()}


def texts(folder: Path, source, count: int, dtype: str, beams: int = 1, penalty: float = 1.0, ends=ENDS):
    """The tokens that greedy decoding or a beam search finds for each source, without the start and the end."""
    settings = {"max_new_tokens": count, "do_sample": False, "num_beams": beams}
    settings |= {"length_penalty": penalty} if beams > 1 else {}
    with torch.no_grad(), hf_torch.precision(dtype):
        rows = hf_torch.read(folder, dtype).generate(**inputs(source), **settings).tolist()
    return [list(takewhile(lambda token: token not in ends, row[1:])) for row in rows]
