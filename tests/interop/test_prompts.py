"""Prompts of models from Hugging Face folders: special tokens, chat templates, token ids, and the beginning of a text."""

import json
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import xfresearch as xf
from tests.field.test_field import FOLDER
from tests.tiny_runs import rough_params, tiny_model
from xfresearch import generate
from xfresearch.data.chat import templates
from xfresearch.data.tokenizers import load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n  {%- if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}\n"
    "<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}\n{% if add_generation_prompt %}\n<|assistant|>{% endif %}"
)
SETTINGS = {"chat_template": TEMPLATE, "bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|endoftext|>"}
END = 259  # <|endoftext|> of the tokenizer of 2020


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of a tiny Llama with the tokenizer of 2020 and a chat template."""
    path = tmp_path_factory.mktemp("chat") / "m"
    lm = tiny_model("llama")
    lm.config, lm.tokenizer = replace(lm.config, vocab_size=264), None
    lm.params = rough_params(lm.config)
    lm.export_hf(path)
    made = FOLDER / "files" / "tokenizers" / "of_2020" / "tokenizer.json"
    (path / "tokenizer.json").write_bytes(made.read_bytes())
    (path / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    return path


@pytest.fixture(scope="module")
def lm(folder):
    return xf.load(folder)


def test_special_tokens_in_a_text_are_text_unless_they_are_asked_for(lm):
    text = "the<|endoftext|>a"
    as_text = lm.encode(text)
    assert END not in as_text and lm.tokenizer.decode(as_text) == text
    assert lm.encode(text, special_tokens=True) == [*lm.encode("the"), END, 97]


def test_a_sentencepiece_model_knows_its_control_pieces(shared_data):
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "llama2_tokenizer.model")
    assert tokenizer.special_tokens == {"<s>": 1, "</s>": 2}
    assert tokenizer.encode_special("a</s>") == [*tokenizer.encode(b"a").tolist(), 2]


def test_generate_takes_ids(lm):
    settings = {"max_new_tokens": 3, "temperature": 0.0}
    expected = lm.generate("the", **settings)
    ids = lm.encode("the")
    assert lm.generate(ids, **settings) == lm.generate(np.array(ids), **settings) == expected
    assert lm.generate([ids, ids], **settings) == lm.generate(["the", "the"], **settings) == [expected] * 2
    assert lm.generate([], **settings) == [] and lm.generate([[]], **settings) == lm.generate([""], **settings)
    with pytest.raises(xf.UserError, match="token 264 is not allowed: the model's token ids are 0 to 263"):
        lm.generate([264])
    with pytest.raises(xf.UserError, match="prompt=3 is not allowed: it must be a text"):
        lm.generate(3)


def test_a_chat_template_is_applied(lm):
    text = "<|endoftext|><|user|>the a<|assistant|>"
    assert templates.render(lm.source.files, [{"role": "user", "content": " the a "}]) == text
    assert lm.chat(" the a ") == lm.tokenizer.encode_special(text) and lm.chat("a")[0] == END


def _jinja(template: str) -> dict[str, bytes]:
    return {"chat_template.jinja": template.encode()}


LIMITS = "cannot be rendered: it takes more than 1 s of processor time or 256 MiB of memory$"


@pytest.mark.parametrize(
    "files, error",
    [
        ({}, "this model has no chat template"),
        ({"chat_template.jinja": b"{% for %}"}, "chat_template.jinja: the chat template cannot be rendered: Expected an"),
        ({"chat_template.jinja": b"{{ ''.__class__.__mro__ }}"}, "access to attribute '__class__' .* is unsafe"),
        ({"chat_template.jinja": b"{{ messages.append(1) }}"}, "is not safely callable|unsafe|not callable"),
        ({"chat_template.jinja": b"{{ messages[0].content + 1 }}"}, "cannot be rendered: can only concatenate"),
        ({"chat_template.jinja": b"{% generation %}"}, "cannot be rendered: Unexpected end of template. .*'endgeneration'"),
        ({"tokenizer_config.json": b"{"}, "tokenizer_config.json: not valid JSON"),
        ({"tokenizer_config.json": b"[" * 100_000}, "tokenizer_config.json: not valid JSON"),
        (_jinja("{{ 'a' + 1 }}"), "can only concatenate str"),
        (_jinja("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3), LIMITS),
        (_jinja("{{ 'a' * 10**10 }}"), LIMITS),
        (_jinja("{{ 'a' * 10**8 }}"), LIMITS),
        (_jinja("{{ 'a' * 2**25 }}"), "its text has 33,554,432 characters, which must be at most 16,777,216"),
        (_jinja("{{ 9**(9**9) }}"), LIMITS),
        (_jinja("{{ 'a' | center(10**12) }}"), LIMITS),
        (_jinja("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "maximum recursion depth exceeded"),
        (_jinja(f"{{{{ {'(' * 9999}1{')' * 9999} }}}}"), "maximum recursion depth exceeded"),
    ],
)
def test_a_template_that_cannot_be_rendered_is_refused_in_one_line(files, error, monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 1)
    with pytest.raises(xf.UserError, match=error) as caught:
        templates.render(files, [{"role": "user", "content": "a"}])
    assert "\n" not in str(caught.value)


# Templates with `{% generation %}`, and what `transformers` makes of a question 'a' and an answer 'b' (tests/parity).
MARKED = {
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}": "ab",
    "{%- for m in messages %}\n  {%- generation %}\n{{ m.content }}\n  {%- endgeneration %}\n{%- endfor %}": "ab",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}": "21",
    "{% generation %}{% if messages %}<{% generation %}|{% endgeneration %}>{% endif %}{% endgeneration %}": "<|>",
    "{% for m in messages %}{% generation %}{{ loop.index }}{% endgeneration %}{% break %}{% endfor %}": "1",
}
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("template, text", MARKED.items())
def test_text_that_is_marked_for_training_is_text(template, text):
    assert templates.render({"chat_template.jinja": template.encode()}, TALK) == text


def test_a_template_that_ran_out_of_its_limits_is_followed_by_others():
    """The values of a rendering are not seen by the next, and half of a surrogate pair comes back as it was."""
    for files in (_jinja("{{ 'a' * 10**10 }}"), _jinja("{% set messages = 1 %}"), _jinja("{{ 'a' + 1 }}")):
        with suppress(xf.UserError):
            templates.render(files, TALK)
        assert templates.render(_jinja("{{ messages[0].content }}"), [{"content": "\ud800\0"}]) == "\ud800\0"


def test_a_template_refuses_by_its_own_words():
    with pytest.raises(xf.UserError, match="cannot be rendered: no system"):
        templates.render({"chat_template.jinja": TEMPLATE.encode()}, [{"role": "system", "content": "a"}])


def test_the_command_has_a_flag_for_each(folder, capsys):
    arguments = ["--workdir", str(folder), "--prompt", "the<|endoftext|>", "--max-new-tokens", "1", "--temperature", "0"]
    for flags in ([], ["--special-tokens"], ["--chat"]):
        generate.main([*arguments, *flags])
        assert capsys.readouterr().out.startswith("the<|endoftext|>")
    with pytest.raises(xf.UserError, match="--special-tokens: .*--chat"):
        generate.parse([*arguments, "--chat", "--special-tokens"])
    given = [SimpleNamespace(chat=False, special_tokens=flag) for flag in (False, True)]
    lm = xf.load(folder)
    assert [list(generate.inputs(lm, ["a<|endoftext|>"], each)) for each in given] == [["a<|endoftext|>"], [[97, END]]]


def test_a_model_without_a_template_is_refused():
    with pytest.raises(xf.UserError, match="no chat template"):
        tiny_model("llama").chat("a")
