"""Keys of config.json that nothing reads."""

import sys

from xfresearch.interop import generation

# Keys that change no logits: names, versions, token ids, settings of training, generation, caches and other heads.
HARMLESS = {
    *("architectures", "model_type", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map"),
    *("use_cache", "cache_implementation", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "prefix"),
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "tokenizer_class", "unk_token_id"),
    *("initializer_range", "init_std", "initializer_factor", "gradient_checkpointing", "output_router_logits"),
    *("return_dict", "output_attentions", "output_hidden_states", "attn_implementation", "_attn_implementation"),
    *("is_causal", "quantization_config", "pretraining_tp", "tie_encoder_decoder", "is_encoder_decoder", "is_decoder"),
    *("task_specific_params", "problem_type", "id2label", "label2id", "finetuning_task", "num_labels", "n_ctx"),
    *("classifier_dropout", "classifier_activation", "chunk_size_feed_forward", "model_max_length", "unsloth_version"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_logits", "summary_first_dropout"),
    *("layerdrop", "activation_dropout", "reorder_and_upcast_attn", "_sliding_window_pattern", "unsloth_fixed"),
    *("custom_pipelines", "_commit_hash", "pruned_heads"),
    *("router_aux_loss_coef", "router_jitter_noise"),
    *generation.SETTINGS,
}


def unread_keys(config: dict, read: set[str]) -> list[str]:
    """The keys of a config.json that are neither in `read` nor known to change no logits."""
    return sorted(key for key in config if key not in read and key not in HARMLESS)


def warn_of_unread(config: dict, read: set[str]) -> None:
    """Names the keys of a config.json that are not read. `transformers` does not read them in this family, either
    (tests/parity/test_hf_keys.py), but the authors of the model may."""
    keys = unread_keys(config, read)
    if keys:
        print(f"warning: config.json: {', '.join(keys)}: not read, here or by transformers", file=sys.stderr)
