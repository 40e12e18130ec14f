"""Writes tests/interop/recorded/: small random models saved by `transformers`, its outputs for some tokens, and two
Mixtral models before and after two steps of training.

    python -m tests.interop.record [NAME ...]

With names, it writes these alone. Run it in an environment with requirements/parity.txt (`make parity` makes one). With
the recording, the default test suite compares with `transformers` without PyTorch. tests/parity/test_hf_recorded.py checks
that the recording is current.

Recorded on 2026-11-21 with torch 2.15.0, transformers 5.23.0; `trained` on 2026-11-22 with torch 2.13.0; the families after
Mixtral on 2026-11-27, and those of masked tokens and of pairs on 2026-11-28, with torch 2.13.0, transformers 5.24.0.
"""

import shutil
import sys
from pathlib import Path

import numpy as np

RECORDED = Path(__file__).parent / "recorded"
SIZES = {"vocab_size": 47, "bos_token_id": None, "eos_token_id": None}
LLAMA = {
    **SIZES,
    **{"hidden_size": 20, "intermediate_size": 27, "num_hidden_layers": 2, "max_position_embeddings": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
}
STRETCHED = {"rope_type": "llama3", "rope_theta": 700.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 16}  # fmt: skip
SMALL = {**LLAMA, "hidden_size": 16, "intermediate_size": 11, "head_dim": 4}
TYPES = ["sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0, "original_max_position_embeddings": 8, "truncate": False}
BY_TYPE = {"full_attention": YARN | {"truncate": True}, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
# {name: (config class of `transformers`, its arguments)}
MODELS = {
    "gpt2": ("GPT2Config", {**SIZES, "n_embd": 18, "n_inner": 35, "n_layer": 2, "n_head": 3, "n_positions": 32}),
    "llama": ("LlamaConfig", {**LLAMA, "attention_bias": True, "rope_parameters": STRETCHED}),
    "mixtral": ("MixtralConfig", {**LLAMA, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5}),
    "gpt_neo": ("GPTNeoConfig", {
        **SIZES, "hidden_size": 18, "intermediate_size": 35, "num_layers": 2, "num_heads": 3, "window_size": 5,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32}),
    "gemma3_text": ("Gemma3TextConfig", {
        **SMALL, "layer_types": TYPES, "sliding_window": 5, "query_pre_attn_scalar": 7, "final_logit_softcapping": 2.0}),
    "qwen3_moe": ("Qwen3MoeConfig", {
        **SMALL, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 11, "mlp_only_layers": [0]}),
    "olmo3": ("Olmo3Config", {**{k: v for k, v in SMALL.items() if k != "head_dim"},
        "layer_types": TYPES, "sliding_window": 5, "rope_parameters": BY_TYPE}),
    "phi3": ("Phi3Config", {
        **{k: v for k, v in SMALL.items() if k != "head_dim"}, "pad_token_id": None, "sliding_window": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5}}),
    "gpt_oss": ("GptOssConfig", {
        **SMALL, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5, "rope_parameters": YARN}),
}  # fmt: skip
SMALL_BERT = {
    **{"vocab_size": 47, "hidden_size": 18, "intermediate_size": 27, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"max_position_embeddings": 32, "hidden_act": "gelu_new"},
}
# Models that predict masked tokens.
MASKED = {
    "bert": ("BertConfig", SMALL_BERT),
    "roberta": ("RobertaConfig", SMALL_BERT | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
}
# Models with an encoder and a decoder. Many ids end a text, so that some texts end.
ENDS = list(range(1, 5))
OF_PAIRS = {"vocab_size": 47, "pad_token_id": 0, "bos_token_id": None, "decoder_start_token_id": 0, "eos_token_id": ENDS}
PAIRS = {
    "t5": ("T5Config", {
        **OF_PAIRS, "d_model": 18, "d_ff": 27, "d_kv": 5, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 1,
        "relative_attention_num_buckets": 6, "relative_attention_max_distance": 9, "feed_forward_proj": "gated-gelu"}),
    "bart": ("BartConfig", {
        **OF_PAIRS, "d_model": 18, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 27, "decoder_ffn_dim": 31,
        "encoder_attention_heads": 2, "decoder_attention_heads": 3, "max_position_embeddings": 32,
        "forced_bos_token_id": 17, "forced_eos_token_id": ENDS[0]}),
}  # fmt: skip
SOURCES = (9, 6)  # tokens of each source
BEAMS = 3
LENGTH = 15
PROMPT = 7
CONTINUATION = 12
TINY = {**MODELS["mixtral"][1], "hidden_size": 8, "intermediate_size": 6, "num_attention_heads": 2, "head_dim": 4,
        "num_key_value_heads": 1, "num_local_experts": 4}  # fmt: skip
# Training: {name: (arguments of MixtralConfig, sequences in a batch)}. `transformers` computes the balance loss over
# all layers and sequences together, we for each separately, so the two are compared with one layer and one sequence.
TRAINED = {
    "two_layers": (TINY | {"router_aux_loss_coef": 0.0}, 3),
    "balanced": (TINY | {"router_aux_loss_coef": 0.1, "num_hidden_layers": 1}, 1),
}
STEPS = 2
RATE = 1.0  # large, so that rounding to float32 is small compared with a step
SEED = 1  # its weights give greedy texts that do not repeat one token


def outputs(name: str, folder: Path) -> dict[str, np.ndarray]:
    """The outputs of `transformers` for the model `name` in `folder`: logits, greedy text, router choices."""
    from tests.interop.folders import highest
    from tests.parity import hf_torch

    tokens_BL = np.random.default_rng(len(name)).integers(0, SIZES["vocab_size"], (2, LENGTH))
    arrays = {
        "tokens": tokens_BL,
        "logits": hf_torch.logits(folder, tokens_BL, "float32"),
        "greedy": hf_torch.greedy(folder, tokens_BL[:, :PROMPT], CONTINUATION, "float32"),
    }
    k = MODELS[name][1].get("num_experts_per_tok")
    if k:
        layers = hf_torch.router_logits(folder, tokens_BL, "float32")
        arrays["choices"] = np.stack([highest(layer_BLE, k) for layer_BLE in layers])
    return arrays


def masked_outputs(name: str, folder: Path) -> dict[str, np.ndarray]:
    """The logits of `transformers` for rows of different lengths, with the types of their tokens."""
    from tests.parity import hf_torch

    rng, types = np.random.default_rng(len(name)), MASKED[name][1].get("type_vocab_size", 2)
    padding = 1 if name == "roberta" else 0
    segments_BL = (np.arange(LENGTH) < np.array([[LENGTH], [LENGTH - 4]])).astype(np.int64)
    tokens_BL = np.where(segments_BL, rng.integers(3, SMALL_BERT["vocab_size"], (2, LENGTH)), padding)
    inputs = {"tokens": tokens_BL, "segments": segments_BL, "types": rng.integers(0, types, (2, LENGTH))}
    return inputs | {"logits": hf_torch.logits_of_padded(folder, *inputs.values(), "float32")}


def sources(name: str) -> list[list[int]]:
    """Sources of different lengths."""
    rng = np.random.default_rng(len(name))
    return [rng.integers(0, OF_PAIRS["vocab_size"], length).tolist() for length in SOURCES]


def pair_outputs(name: str, folder: Path) -> dict[str, np.ndarray]:
    """The logits of `transformers`, and the texts that a beam search finds, filled up with -1."""
    from tests.parity import hf_seq2seq

    tokens_BL = np.random.default_rng(len(name)).integers(0, OF_PAIRS["vocab_size"], (2, LENGTH))
    logits_BLV = hf_seq2seq.outputs(folder, sources(name), tokens_BL, "float32")["logits"]
    texts = hf_seq2seq.texts(folder, sources(name), CONTINUATION, "float32", BEAMS, ends=ENDS)
    beams = np.array([[*text, *[-1] * (CONTINUATION - len(text))] for text in texts])
    return {"tokens": tokens_BL, "logits": logits_BLV, "beams": beams}


def batches(name: str) -> np.ndarray:
    """Tokens [STEPS, B, LENGTH + 1]: inputs and, shifted by one, targets."""
    _, rows = TRAINED[name]
    return np.random.default_rng(rows).integers(0, SIZES["vocab_size"], (STEPS, rows, LENGTH + 1))


def train(name: str, folder: Path) -> None:
    """Writes the model before and after STEPS steps of SGD to `folder`, and the loss of each step."""
    import transformers
    from safetensors.numpy import save_file

    from tests.parity import hf_torch

    arguments, _ = TRAINED[name]
    hf_torch.write_random(transformers.MixtralConfig(**arguments), folder / "before", seed=SEED)
    losses = hf_torch.train(folder / "before", batches(name), RATE, folder / "after")
    save_file({"losses": np.array(losses)}, folder / "losses.safetensors")


def main() -> None:
    import transformers
    from safetensors.numpy import save_file

    from tests.parity import hf_torch

    recorders = dict.fromkeys(MODELS, outputs) | dict.fromkeys(MASKED, masked_outputs) | dict.fromkeys(PAIRS, pair_outputs)
    names = sys.argv[1:] or [*recorders, *TRAINED]
    for name in names:
        shutil.rmtree(RECORDED / ("trained" if name in TRAINED else "") / name, ignore_errors=True)
    for name in (name for name in recorders if name in names):
        kind, arguments = (MODELS | MASKED | PAIRS)[name]
        hf_torch.write_random(getattr(transformers, kind)(**arguments), RECORDED / name, seed=SEED)
        save_file(recorders[name](name, RECORDED / name), RECORDED / f"{name}.safetensors")
    for name in (name for name in TRAINED if name in names):
        train(name, RECORDED / "trained" / name)


if __name__ == "__main__":
    main()
