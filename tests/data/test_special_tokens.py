"""Which tokens begin and end a text: found in the tokenizer's file and in those beside it, and kept by `save`."""

import pytest

from tests.data import made_tokenizers as made
from tests.data.test_lossless import GEMMA
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.errors import UserError

VOCABULARY = {"<s>": 0, "<pad>": 1, "</s>": 2, **{c: i for i, c in enumerate("abcdeh<>/s", 3)}, "ab": 13}
MERGES = "#version: 0.2\na b\n"
BEGINS_AND_ENDS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}


@pytest.fixture
def load(tmp_path):
    """load({name: content}) is the tokenizer in a folder of these files, after it was saved and loaded again."""

    def load(files: dict):
        made.write(tmp_path / "folder", files)
        first = load_tokenizer(tmp_path / "folder")
        first.save(tmp_path / "saved")
        second = load_tokenizer(tmp_path / "saved")
        for name in ("begin_of_text", "end_of_text", "stops", "lossless", "vocab_size", "digest", "files"):
            assert getattr(second, name) == getattr(first, name), name
        return second

    return load


def llama_json(begins: bool = True, **parts) -> str:
    return made.byte_fallback(**({"post_processor": made.template("<s>", 1)} if begins else {}), **parts)


def test_a_text_begins_as_the_post_processor_says(load):
    assert load({"tokenizer.json": llama_json()}).begin_of_text == 1


@pytest.mark.parametrize("files", [
    {"tokenizer.json": llama_json(begins=False)},
    {"tokenizer.json": llama_json(begins=False), "tokenizer_config.json": BEGINS_AND_ENDS | {"add_bos_token": True}},
    {"tokenizer.json": made.byte_level(), "tokenizer_config.json": BEGINS_AND_ENDS},
    {"vocab.json": VOCABULARY, "merges.txt": MERGES, "tokenizer_config.json": BEGINS_AND_ENDS},
    {"tokenizer.model": made.sentence_piece()},
    {"tokenizer.model": made.sentence_piece(), "tokenizer_config.json": BEGINS_AND_ENDS | {"add_bos_token": False}},
    {"bytes.json": {"kind": "bytes"}},
])  # fmt: skip
def test_nothing_begins_a_text_unless_a_file_says_so(load, files):
    assert load(files).begin_of_text is None


def test_a_post_processor_that_ends_a_text_does_not_begin_it(load):
    from tokenizers import processors

    ends = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    assert load({"tokenizer.json": made.byte_fallback(post_processor=ends)}).begin_of_text is None


def test_sentencepiece_begins_a_text_where_its_folder_says_so(load):
    model = made.sentence_piece()
    tokenizer = load({"tokenizer.model": model, "tokenizer_config.json": {"add_bos_token": True}})
    assert (tokenizer.begin_of_text, tokenizer.end_of_text) == (1, 2)
    swapped = {"bos_token": "</s>", "eos_token": "<s>", "add_bos_token": True}
    tokenizer = load({"tokenizer.model": model, "tokenizer_config.json": swapped})
    assert (tokenizer.begin_of_text, tokenizer.end_of_text) == (2, 1)


def test_gpt2s_two_files_begin_and_end_as_their_folder_says(load):
    """OPT: both are </s>, which is no word of a text."""
    files = {"vocab.json": VOCABULARY, "merges.txt": MERGES}
    says = {"bos_token": "</s>", "eos_token": "</s>", "add_bos_token": True}
    tokenizer = load(files | {"tokenizer_config.json": says})
    assert (tokenizer.begin_of_text, tokenizer.end_of_text, tokenizer.vocab_size) == (2, 2, 14)
    ids = tokenizer.encode(b"ab</s>")
    assert ids.tolist() == [13, VOCABULARY["<"], VOCABULARY["/"], VOCABULARY["s"], VOCABULARY[">"]]
    assert tokenizer.decode([2, *ids, 2]) == "ab</s>"


@pytest.mark.parametrize("more, says", [
    ({"tokenizer_config.json": {"tokenizer_class": "Qwen2TokenizerFast"}}, "the tokenizer is a Qwen2Tokenizer: "),
    ({"added_tokens.json": {"<tool>": 14}}, "the tokenizer is GPT-2's with added_tokens.json: "),
])  # fmt: skip
def test_two_files_like_gpt2s_that_are_read_otherwise_are_refused(load, more, says):
    files = {"vocab.json": VOCABULARY, "merges.txt": MERGES}
    assert load(files | {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}}).vocab_size == 14
    with pytest.raises(UserError, match=says):
        load(files | more)


def test_gpt2s_two_files_alone_have_a_separator_of_a_customary_name_or_get_one(load):
    files = {"vocab.json": VOCABULARY, "merges.txt": MERGES}
    tokenizer = load(files)
    assert (tokenizer.end_of_text, tokenizer.vocab_size, tokenizer.begin_of_text) == (2, 14, None)
    renamed = {"</end>" if word == "</s>" else word: i for word, i in VOCABULARY.items()}
    tokenizer = load(files | {"vocab.json": renamed})
    assert (tokenizer.end_of_text, tokenizer.vocab_size, tokenizer.begin_of_text) == (14, 15, None)


NAMED, TWO, WORD = {"eos_token": "<unk>"}, {"eos_token_id": [1, 2]}, {"eos_token_id": 261}
ENDS = {
    "guess": ({}, (2,)),
    "name": ({"tokenizer_config.json": NAMED}, (0,)),
    "map": ({"special_tokens_map.json": NAMED}, (0,)),
    "name before map": ({"tokenizer_config.json": NAMED, "special_tokens_map.json": BEGINS_AND_ENDS}, (0,)),
    "no name, but a map": ({"tokenizer_config.json": {"eos_token": None}, "special_tokens_map.json": NAMED}, (0,)),
    "number": ({"config.json": {"eos_token_id": 1, "vocab_size": 9}}, (1,)),
    "several": ({"generation_config.json": TWO, "config.json": WORD}, (1, 2)),
    "name and several": ({"tokenizer_config.json": NAMED, "generation_config.json": TWO}, (0, 1, 2)),
    "a name that is no token": ({"tokenizer_config.json": {"eos_token": "<eos>"}}, (2,)),
    "numbers of no token": ({"config.json": {"eos_token_id": [50256, -1, True, None, "a"]}}, (2,)),
    "the number of a word": ({"config.json": WORD}, (2, 261)),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_text_ends_by_name_then_number_then_custom(load, name):
    beside, stops = ENDS[name]
    tokenizer = load({"tokenizer.json": llama_json(), **beside})
    assert (tokenizer.end_of_text, tokenizer.stops) == (stops[0], stops)
    assert tokenizer.decode(tokenizer.encode(b"a the")) == "a the"


def test_a_file_alone_is_taken_alone(tmp_path):
    made.write(tmp_path, {"tokenizer.json": llama_json(), "tokenizer_config.json": NAMED})
    assert load_tokenizer(tmp_path / "tokenizer.json").end_of_text == 2


def test_of_both_forms_tokenizer_json_is_read(load):
    files = {"tokenizer.json": made.byte_level(), "tokenizer.model": made.sentence_piece()}
    assert load(files).files.keys() == {"tokenizer.json"}


def test_what_begins_a_text_separates_two_where_nothing_else_does(load):
    """No token of a customary name ends a text here: rather <s>, which the model knows, than an id that it does not."""
    content = llama_json().replace("</s>", "<stop>")
    tokenizer = load({"tokenizer.json": content})
    assert (tokenizer.begin_of_text, tokenizer.end_of_text) == (1, 1)


def test_saved_settings_of_a_folder_are_the_tokenizers_alone(load):
    config = {"eos_token_id": [2, 0], "temperature": 0.6}
    tokenizer = load({"tokenizer.json": llama_json(), "generation_config.json": config, "config.json": {"depth": 3}})
    assert tokenizer.files["generation_config.json"] == b'{"eos_token_id": [2, 0]}\n'
    assert tokenizer.files.keys() == {"tokenizer.json", "generation_config.json"}


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
@pytest.mark.parametrize("content, says", [("{", "invalid JSON"), ("[1]", "holds a JSON list; it must be an object"),
                                           (b"\xff", "invalid JSON")])  # fmt: skip
def test_a_broken_file_beside_is_named(tmp_path, name, content, says):
    made.write(tmp_path, {"tokenizer.json": llama_json(), name: content})
    with pytest.raises(UserError) as raised:
        load_tokenizer(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}/{name}: {says}") and "\n" not in str(raised.value)


def test_words_beside_the_vocabulary_have_their_bytes(load):
    """Gemma's runs of spaces are words added to the vocabulary, written with U+2581."""
    tokenizer = load({"tokenizer.json": llama_json(**GEMMA)})
    run = tokenizer.encode(b"a  a")[1]
    assert tokenizer.token_bytes[run] == b"  " and tokenizer.decode([run, run]) == "    "
