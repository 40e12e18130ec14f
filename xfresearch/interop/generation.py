"""The generation settings of a Hugging Face folder: generation_config.json, or config.json in a folder without this file."""

import json
import sys
from functools import cache
from typing import Any

from xfresearch.interop.source import Source
from xfresearch.models.sampling import Beams, Rules, Settings, parts
from xfresearch.runtime.errors import UserError, shortened
from xfresearch.runtime.files import object_in

FILE = "generation_config.json"
# Settings that change a text and are not read, and the argument of `generate` that stands for one.
UNREAD = {"num_beams": "beams", "max_length": "max_new_tokens", "max_new_tokens": "max_new_tokens"}
UNREAD |= {"temperature": "temperature", "do_sample": "temperature", "top_k": "top_k", "top_p": "top_p"}
_NAMES = """
    min_new_tokens max_time stop_strings min_p top_h typical_p epsilon_cutoff eta_cutoff encoder_repetition_penalty
    encoder_no_repeat_ngram_size exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias
    token_healing guidance_scale watermarking_config renormalize_logits remove_invalid_values num_return_sequences
    diversity_penalty num_beam_groups constraints force_words_ids penalty_alpha dola_layers prompt_lookup_num_tokens
"""
UNREAD |= dict.fromkeys(_NAMES.split(), "")
SETTINGS = {*Settings.__annotations__, *UNREAD}
# Keys that change no text, and token ids, which the tokenizer has (special_tokens.py).
_QUIET = {"transformers_version", "use_cache", "return_dict_in_generate", "max_cache_len", "low_memory"}
_QUIET |= {"cache_implementation", "cache_config", "compile_config", "disable_compile"}
_QUIET |= {f"{name}_token_id" for name in ("bos", "eos", "pad", "decoder_start", "forced_bos", "forced_eos")}


def settings(source: Source | None) -> Settings:
    """The settings of a model's folder that are read. Names the others that change a text on standard error, once.
    Raises UserError for a value that is not allowed."""
    if source is None:
        return {}
    named = FILE in source.files
    file, values = (FILE, object_in(source.files, FILE)) if named else ("config.json", source.config)
    stated = {key: value for key, value in values.items() if value is not None and (named or key in SETTINGS)}
    read = {key: stated.pop(key) for key in Settings.__annotations__ if key in stated}
    _warn(file, tuple((key, shortened(json.dumps(stated[key]), 60)) for key in sorted(stated) if _counts(key, stated[key])))
    try:
        rules, search = parts(read)
        Rules(**rules), Beams(**search)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return read  # type: ignore[return-value]


def _counts(key: str, value: Any) -> bool:
    """Whether a setting that is not read changes a text: 0, 1, false and nothing do not."""
    quiet = key in _QUIET or key.startswith(("_", "output_"))
    return not quiet and (value is True or value not in (False, 0, 1, "", [], {}))


@cache
def _warn(file: str, unread: tuple[tuple[str, str], ...]) -> None:
    if unread:
        instead = sorted({UNREAD[key] for key, _ in unread if UNREAD.get(key)})
        more = f"; see {', '.join(instead)}" if instead else ""
        print(f"warning: {file}: {', '.join(map('='.join, unread))}: not read{more}", file=sys.stderr)
