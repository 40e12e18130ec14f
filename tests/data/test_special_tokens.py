"""Special tokens of the tokenizer file and of the settings files next to it. `save` keeps them."""

import pytest

from tests.data import made_tokenizers as made
from tests.data.test_lossless import GEMMA
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.runtime.errors import UserError

VOCABULARY = {"<s>": 0, "<pad>": 1, "</s>": 2, **{c: i for i, c in enumerate("abcdeh<>/s", 3)}, "ab": 13}
MERGES = "#version: 0.2\na b\n"
BEGINS_AND_ENDS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}


@pytest.fixture
def load(tmp_path):
    """load({name: content}) loads the tokenizer in a directory of these files, saves it and loads it again."""

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


def test_post_processor_defines_begin_of_text(load):
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
def test_begin_of_text_is_none_unless_a_file_defines_it(load, files):
    assert load(files).begin_of_text is None


def test_post_processor_that_ends_a_text_defines_no_begin_of_text(load):
    from tokenizers import processors

    ends = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    assert load({"tokenizer.json": made.byte_fallback(post_processor=ends)}).begin_of_text is None


def test_settings_files_define_begin_of_text_of_sentencepiece(load):
    model = made.sentence_piece()
    tokenizer = load({"tokenizer.model": model, "tokenizer_config.json": {"add_bos_token": True}})
    assert (tokenizer.begin_of_text, tokenizer.end_of_text) == (1, 2)
    swapped = {"bos_token": "</s>", "eos_token": "<s>", "add_bos_token": True}
    tokenizer = load({"tokenizer.model": model, "tokenizer_config.json": swapped})
    assert (tokenizer.begin_of_text, tokenizer.end_of_text) == (2, 1)


def test_settings_files_define_special_tokens_of_gpt2_files(load):
    """As in OPT, both are </s>. The string </s> in a text is not encoded as that token."""
    files = {"vocab.json": VOCABULARY, "merges.txt": MERGES}
    settings = {"bos_token": "</s>", "eos_token": "</s>", "add_bos_token": True}
    tokenizer = load(files | {"tokenizer_config.json": settings})
    assert (tokenizer.begin_of_text, tokenizer.end_of_text, tokenizer.vocab_size) == (2, 2, 14)
    ids = tokenizer.encode(b"ab</s>")
    assert ids.tolist() == [13, VOCABULARY["<"], VOCABULARY["/"], VOCABULARY["s"], VOCABULARY[">"]]
    assert tokenizer.decode([2, *ids, 2]) == "ab</s>"


@pytest.mark.parametrize("more, message", [
    ({"tokenizer_config.json": {"tokenizer_class": "Qwen2TokenizerFast"}}, "the tokenizer is a Qwen2Tokenizer: "),
    ({"added_tokens.json": {"<tool>": 14}}, "the tokenizer is GPT-2's with added_tokens.json: "),
])  # fmt: skip
def test_files_of_other_tokenizers_than_gpt2_are_an_error(load, more, message):
    files = {"vocab.json": VOCABULARY, "merges.txt": MERGES}
    assert load(files | {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}}).vocab_size == 14
    with pytest.raises(UserError, match=message):
        load(files | more)


def test_gpt2_files_without_settings_use_a_customary_separator_or_add_one(load):
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
def test_end_of_text_is_found_by_name_then_id_then_customary_name(load, name):
    settings, stops = ENDS[name]
    tokenizer = load({"tokenizer.json": llama_json(), **settings})
    assert (tokenizer.end_of_text, tokenizer.stops) == (stops[0], stops)
    assert tokenizer.decode(tokenizer.encode(b"a the")) == "a the"


def test_settings_files_are_ignored_for_the_path_of_a_file(tmp_path):
    made.write(tmp_path, {"tokenizer.json": llama_json(), "tokenizer_config.json": NAMED})
    assert load_tokenizer(tmp_path / "tokenizer.json").end_of_text == 2


def test_a_vocabulary_named_as_a_file_is_read_by_the_settings_beside_it(tmp_path):
    """It does not say itself whose it is: Qwen's vocab.json has the form of GPT-2's, and BERT's may have capitals."""
    cased = {"vocab.txt": made.word_pieces() + "The\n", "tokenizer_config.json": {"do_lower_case": False}}
    made.write(tmp_path / "bert", cased)
    tokenizer = load_tokenizer(tmp_path / "bert" / "vocab.txt")
    assert tokenizer.decode(tokenizer.encode(b"The cat")) == "The cat"
    made.write(tmp_path / "qwen", made.roberta() | {"tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer"}})
    for name in ("", "vocab.json"):
        with pytest.raises(UserError, match="the tokenizer is a Qwen2Tokenizer"):
            load_tokenizer(tmp_path / "qwen" / name)


def test_tokenizer_json_takes_precedence_over_tokenizer_model(load):
    files = {"tokenizer.json": made.byte_level(), "tokenizer.model": made.sentence_piece()}
    assert load(files).files.keys() == {"tokenizer.json"}


def test_begin_of_text_separates_texts_if_there_is_no_end_of_text(load):
    """No token has a customary separator name. <s>, which the model has seen, is better than a new id."""
    content = llama_json().replace("</s>", "<stop>")
    tokenizer = load({"tokenizer.json": content})
    assert (tokenizer.begin_of_text, tokenizer.end_of_text) == (1, 1)


def test_save_writes_only_the_settings_of_the_tokenizer(load):
    config = {"eos_token_id": [2, 0], "temperature": 0.6}
    tokenizer = load({"tokenizer.json": llama_json(), "generation_config.json": config, "config.json": {"depth": 3}})
    assert tokenizer.files["generation_config.json"] == b'{"eos_token_id": [2, 0]}\n'
    assert tokenizer.files.keys() == {"tokenizer.json", "generation_config.json"}


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
@pytest.mark.parametrize("content, message", [
    ("{", "not valid JSON"), ("[1]", "holds a JSON list: it must be an object"), (b"\xff", "not valid JSON"),
])  # fmt: skip
def test_error_of_an_invalid_settings_file_names_it(tmp_path, name, content, message):
    made.write(tmp_path, {"tokenizer.json": llama_json(), name: content})
    with pytest.raises(UserError) as raised:
        load_tokenizer(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}/{name}: {message}") and "\n" not in str(raised.value)


def test_added_words_have_their_bytes(load):
    """Gemma adds runs of spaces to the vocabulary, written with U+2581."""
    tokenizer = load({"tokenizer.json": llama_json(**GEMMA)})
    run = tokenizer.encode(b"a  a")[1]
    assert tokenizer.token_bytes[run] == b"  " and tokenizer.decode([run, run]) == "    "
