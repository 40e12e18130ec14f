"""What the files of T5 and BART say about tokens: sentinels, where a decoder starts, and tokens that are forced."""

import numpy as np
import pytest

from tests.data import made_tokenizers as made
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.data.tokenizers.added_ids import added_ids, sentinels
from xfresearch.options.objectives import SpanCorruption

T5 = {"model_type": "unigram", "byte_fallback": False, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
NAMED = {"additional_special_tokens": [f"<extra_id_{i}>" for i in range(7)]}


@pytest.mark.parametrize(
    "files, count",
    [
        ({"tokenizer_config.json": {"extra_ids": 5}}, 5),
        ({"special_tokens_map.json": NAMED, "config.json": {"model_type": "t5"}}, 7),
        ({"tokenizer_config.json": {"tokenizer_class": "T5Tokenizer"}}, 100),
        ({"config.json": {"model_type": "t5", "decoder_start_token_id": 0}}, 100),
        ({"config.json": {"model_type": "t5"}, "tokenizer_config.json": {"eos_token": "</s>"}}, 100),
        ({"config.json": {"model_type": "llama"}}, 0),
        ({"tokenizer_config.json": {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}}, 0),
    ],
)
def test_sentinels_follow_the_pieces_of_a_sentencepiece_model(files, count, tmp_path):
    """The first one has the last id. A saved tokenizer has them, too; its directory has no config.json."""
    made.write(tmp_path / "folder", {"spiece.model": made.sentence_piece(**T5), **files})
    load_tokenizer(tmp_path / "folder").save(tmp_path / "saved")
    read, plain = load_tokenizer(tmp_path / "saved"), load_tokenizer(tmp_path / "folder" / "spiece.model")
    assert read.vocab_size == plain.vocab_size + count
    assert np.array_equal(read.encode(b"the cat"), plain.encode(b"the cat")) and plain.end_of_text == read.end_of_text == 1
    objective = SpanCorruption()
    own = sentinels(objective, read)
    if count:
        assert added_ids(objective, read.special_tokens) == 0
        assert own.tolist() == [*range(read.vocab_size - 1, plain.vocab_size - 1, -1)]
        ids = read.encode_special("the<extra_id_0> cat<extra_id_1>")
        assert {read.vocab_size - 1, read.vocab_size - 2} <= {*ids} and "extra" not in read.decode(ids)
    else:
        assert added_ids(objective, read.special_tokens) == len(own) == 100


def test_a_folder_says_where_a_decoder_starts_and_what_is_forced(tmp_path):
    """generation_config.json counts before config.json, key by key. An id that no token has is left out."""
    config = {"decoder_start_token_id": 2, "forced_bos_token_id": 0, "forced_eos_token_id": 2}
    made.write(tmp_path / "folder", {"tokenizer.json": made.byte_level(), "config.json": config})
    made.write(tmp_path / "folder", {"generation_config.json": {"forced_bos_token_id": 1, "num_beams": 4}})
    load_tokenizer(tmp_path / "folder").save(tmp_path / "saved")
    for place in ("folder", "saved"):
        read = load_tokenizer(tmp_path / place)
        assert (read.decoder_start, read.forced) == (2, (1, 2))
    made.write(tmp_path / "folder", {"generation_config.json": {"forced_bos_token_id": 10**6}})
    assert load_tokenizer(tmp_path / "folder").forced == (None, 2)
