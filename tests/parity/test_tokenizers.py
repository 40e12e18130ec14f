"""Tokenizers of Hugging Face folders give the same ids and special tokens as `transformers`."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tokenizers import pre_tokenizers

from tests.data import made_tokenizers as made
from tests.data.conftest import shared
from tests.data.test_seq2seq_tokens import T5
from tests.interop.test_prompts import MARKED, TALK
from tests.parity.weights import MISSING
from tests.tiny_runs import tiny_model
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.data.tokenizers.added_ids import added_ids, sentinels
from xfresearch.options.objectives import SpanCorruption

transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))
pytestmark = pytest.mark.parity

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
FAST, LLAMA, GPT2 = (
    {"tokenizer_class": name} for name in ("PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer")
)
ADD_BOS = {"add_bos_token": True}
NO_BOS = {"add_bos_token": False}
OPT = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
TWO = {"vocab.json": {"<s>": 0, "<pad>": 1, "</s>": 2, **{c: i for i, c in enumerate("abcdehnort\u0120", 3)}, "th": 14}}
TWO |= {"merges.txt": "#version: 0.2\nt h\n"}


def fast(content: str, **config) -> dict:
    return {"tokenizer.json": content, "tokenizer_config.json": FAST | config}


def with_template() -> str:
    return made.byte_fallback(post_processor=made.template("<s>", 1))


FOLDERS = {
    "template": lambda: fast(with_template(), **NAMES),
    "template, config says no": lambda: fast(with_template(), **NAMES, **NO_BOS),
    "no template": lambda: fast(made.byte_fallback(), **NAMES),
    "no template, config says yes": lambda: fast(made.byte_fallback(), **NAMES, **ADD_BOS),
    "byte level": lambda: fast(made.byte_level(), eos_token="<|endoftext|>"),
    "opt": lambda: TWO | {"tokenizer_config.json": GPT2 | OPT | ADD_BOS},
    "gpt2's two files": lambda: TWO | {"tokenizer_config.json": GPT2 | OPT},
    "llama 2": lambda: {"tokenizer.model": llama2(), "tokenizer_config.json": LLAMA | NAMES | ADD_BOS},
    "llama 2, no beginning": lambda: {"tokenizer.model": llama2(), "tokenizer_config.json": LLAMA | NAMES | NO_BOS},
    "llama 2, config says nothing": lambda: {"tokenizer.model": llama2(), "tokenizer_config.json": LLAMA | NAMES},
    "gpt2": lambda: {"tokenizer.json": shared("tokenizers/gpt2_hf_tokenizer.json").read_bytes(),
                     "tokenizer_config.json": GPT2},
}  # fmt: skip


def llama2() -> bytes:
    return shared("tokenizers/llama2_tokenizer.model").read_bytes()


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_equal_those_of_transformers(tmp_path, name):
    made.write(tmp_path, FOLDERS[name]())
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    begin = [] if ours.begin_of_text is None else [ours.begin_of_text]
    # SentencePiece itself, whose published ids we reproduce, splits two spaces differently from its copy in `transformers`.
    texts = ["a the", "the rat\n ran", "red a"] + ([] if name.startswith("llama 2") else ["the  rat", "red  a  "])
    for text in texts:
        assert theirs(text).input_ids == begin + ours.encode(text.encode()).tolist()
    assert theirs.eos_token_id == ours.end_of_text
    assert bool(begin) == (name in ("template", "template, config says no", "opt", "llama 2"))


# A beginning that is added, one that is named and not added, an end alone, neither.
PREFIXES = FOLDERS | {
    "neither": lambda: fast(made.byte_level(), unk_token="<|endoftext|>"),
    "end only": lambda: fast(made.byte_fallback(), eos_token="</s>"),
    "phi 3": lambda: {"tokenizer.json": made.byte_fallback(),
                      "tokenizer_config.json": LLAMA | {"bos_token": "<s>", "eos_token": "<unk>"} | NO_BOS},
    "llama 2, a class alone": lambda: {"tokenizer.model": llama2(), "tokenizer_config.json": LLAMA},
    "another beginning": lambda: fast(with_template(), bos_token="<unk>", eos_token="</s>"),
    "in the map of special tokens": lambda: fast(made.byte_fallback(), eos_token="</s>") | {
        "special_tokens_map.json": {"bos_token": "<s>"}},
    "t5": lambda: {"spiece.model": made.sentence_piece(**T5), "tokenizer_config.json": {"tokenizer_class": "T5Tokenizer"}},
}  # fmt: skip


@pytest.mark.parametrize("name", PREFIXES)
def test_the_prefix_token_is_that_of_lm_evals_backend(tmp_path, name):
    HFLM = pytest.importorskip("lm_eval.models.huggingface", reason=MISSING.format("lm_eval")).HFLM
    from xfresearch.harness.adapter import Adapter
    from xfresearch.harness.items import Items

    made.write(tmp_path, PREFIXES[name]())
    theirs = SimpleNamespace(tokenizer=transformers.AutoTokenizer.from_pretrained(tmp_path), custom_prefix_token_id=None)
    lm = tiny_model("gpt2")
    lm.config = replace(lm.config, vocab_size=60_000)
    lm.tokenizer = load_tokenizer(tmp_path)
    expected = HFLM.prefix_token_id.fget(theirs)  # None for a tokenizer without special tokens, for which lm_eval fails
    assert Adapter(lm, Items(), 64, 2).prefix_token_id == (lm.tokenizer.end_of_text if expected is None else expected)
    assert (expected is None) == (name == "neither")


@pytest.mark.parametrize("config", ["gpt2", "llama"])
def test_an_exported_model_has_the_same_tokenizer_in_transformers(tmp_path, config):
    """It does not pre-tokenize, unlike GPT-2's own tokenizer, which splits "'t" off a word; and texts end at 0."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.write(tmp_path / "made", {"tokenizer.json": made.byte_level(pre_tokenizer=whole)})
    lm = tiny_model(config)
    lm.tokenizer = load_tokenizer(tmp_path / "made")
    lm.export_hf(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_tokenizer(tmp_path / "out")
    for text in ("a 'the", " th the\n"):
        assert (
            theirs(text).input_ids == ours.encode(text.encode()).tolist() == lm.tokenizer.encode(text.encode()).tolist()
        )
    ends = transformers.AutoConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert theirs.eos_token_id == ends == ours.end_of_text == lm.tokenizer.end_of_text == 0


@pytest.mark.parametrize("settings", [{"extra_ids": 7}, {}])
def test_t5_has_the_same_sentinels_in_transformers(tmp_path, settings):
    """With a SentencePiece model alone, and with the tokenizer.json that `transformers` makes of it."""
    kind = {"tokenizer_class": "T5Tokenizer"} | settings
    made.write(tmp_path / "sp", {"spiece.model": made.sentence_piece(**T5), "tokenizer_config.json": kind})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "sp")
    theirs.save_pretrained(tmp_path / "fast")
    assert not (tmp_path / "sp" / "tokenizer.json").exists() and (tmp_path / "fast" / "tokenizer.json").exists()
    count = settings.get("extra_ids", 100)
    expected = theirs.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(count)])
    for folder in ("sp", "fast"):
        ours = load_tokenizer(tmp_path / folder)
        assert sentinels(SpanCorruption(), ours).tolist() == expected
        assert added_ids(SpanCorruption(), ours.special_tokens) == 0
        assert ours.vocab_size == len(theirs) and ours.begin_of_text is None
        for text in ("the cat and the dog", "a man a plan"):
            assert theirs(text).input_ids == [*ours.encode(text.encode()).tolist(), ours.end_of_text]


@pytest.mark.parametrize("template, text", MARKED.items())
def test_a_template_with_marks_is_rendered_as_here(template, text):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([TALK], chat_template=template, add_generation_prompt=True)
    assert rendered == [text]
