"""The chat template of a Hugging Face folder: Jinja that turns messages into the text that the model was trained on."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from xfresearch.runtime import confined
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import object_in

FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")  # the first with a template counts
SECONDS, MEMORY = 2, 1 << 28  # of processor time, and bytes, to render a template
TEXTS_PER_SECOND = 100  # more time for many texts


class Part(NamedTuple):
    """The first `messages` of a conversation, and whether its text goes on to where the answer begins."""

    messages: int
    answers: bool


class Template(NamedTuple):
    """A chat template, and what it sees beside the messages."""

    file: str  # the name of the file that has it
    source: str
    special_tokens: dict[str, str]  # {'bos_token': '<s>', ...}

    @classmethod
    def of(cls, files: Mapping[str, bytes]) -> "Template":
        """The template among the `files` of a folder, by name. Raises UserError if there is none."""
        return cls(*_template(files), _special_tokens(files))

    def texts(self, conversations: Sequence[dict], parts: Sequence[Sequence[Part]], today: str = "") -> list[Any]:
        """The texts of the parts of each conversation, {"messages": [{"role": "user", "content": "..."}], "tools": ...}; for
        a conversation that the template refuses, its message, a str.

        As in `transformers`, the template runs in Jinja's sandbox, and sees the names of the special tokens; here it runs in
        another process, with limits of time and memory. It is told the date `today`, YYYY-MM-DD, by default that of the
        clock. Raises UserError if it cannot be read.
        """
        jobs = list(zip(conversations, parts, strict=True))
        request = json.dumps([self.source, self.special_tokens, today, jobs]).encode()
        seconds = SECONDS + sum(map(len, parts)) // TEXTS_PER_SECOND
        try:
            answers = b"".join(confined.ask("xfresearch.data.chat.rendering", request, seconds, MEMORY))
        except confined.Failed as error:
            raise self.refusal(str(error)) from None
        return [json.loads(line) for line in answers.splitlines()]

    def refusal(self, why: str) -> UserError:
        """The error of messages that it does not render."""
        return UserError(f"{self.file}: the chat template cannot be rendered: {why}")


def render(files: Mapping[str, bytes], messages: Sequence[dict]) -> str:
    """The text of `messages` by the template among a folder's `files`, up to where the answer begins. Raises UserError if
    there is no template, or if it cannot be rendered."""
    template = Template.of(files)
    texts = template.texts([{"messages": list(messages)}], [[Part(len(messages), True)]])[0]
    if isinstance(texts, str):
        raise template.refusal(texts)
    text: str = texts[0]
    return text


def _template(files: Mapping[str, bytes]) -> tuple[str, str]:
    """The name of the file with the template, and the template."""
    for name in FILES:
        if name not in files:
            continue
        if name.endswith(".jinja"):
            return name, files[name].decode("utf-8", "replace")
        template = object_in(files, name).get("chat_template")
        if isinstance(template, list):  # several, with names
            named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
            template = named.get("default")
        if isinstance(template, str):
            return name, template
    raise UserError(f"this model has no chat template: its Hugging Face folder has none in {', '.join(FILES)}")


def _special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    values = object_in(files, "special_tokens_map.json") | object_in(files, "tokenizer_config.json")
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in contents.items() if key.endswith("_token") and isinstance(value, str)}
