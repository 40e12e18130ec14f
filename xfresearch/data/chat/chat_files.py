"""Conversations from files of rows: `messages`, perhaps with `tools`, or a prompt and its completion."""

import json
from typing import Any

from xfresearch.data.given import require_given_corpus
from xfresearch.data.pairs.pair_files import PairFiles
from xfresearch.data.rows import text_of
from xfresearch.options.run_options import DataConfig
from xfresearch.runtime.errors import UserError


class ChatFiles(PairFiles):
    """Conversations of local files, as pairs: the first message of the user, whose hash decides the split where file names
    do not, and the conversation in JSON, {"where": its place, "messages": [...], "tools": [...]}."""

    what = "conversations"
    option = "config.data.objective.messages_field, prompt_field, completion_field"

    def __init__(self, path: str, data: DataConfig):
        chosen = data.objective
        super().__init__(path, chosen.prompt_field, chosen.completion_field, links=data.links)
        self.messages = chosen.messages_field

    def identity(self) -> dict:
        return super().identity() | {"messages": self.messages}

    def pair_of(self, row, where: str) -> tuple[bytes, bytes]:
        """Raises UserError for a row that is no conversation."""
        own: dict[str, Any] = {"where": where}
        if isinstance(row, dict) and self.messages in row:
            own |= {"messages": _messages(row[self.messages], where, self.messages)}
            if tools := row.get("tools"):
                own["tools"] = _parsed(tools, where)
        else:
            prompt, completion = (text_of(row, where, field, self.option).decode() for field in self.fields)
            roles = ("user", prompt), ("assistant", completion)
            own |= {"messages": [{"role": role, "content": content} for role, content in roles]}
        first = next((each for each in own["messages"] if each["role"] == "user"), own["messages"][0])
        return json.dumps(first, sort_keys=True).encode(), json.dumps(own).encode()


def open_conversations(corpus: str, data: DataConfig) -> ChatFiles:
    """The conversations of a file, a directory or a glob. Raises UserError if there is none."""
    require_given_corpus(corpus)
    return ChatFiles(corpus.removeprefix("text_files:"), data)


def _messages(value, where: str, field: str) -> list[dict]:
    """The messages of a row, without the fields that are null: tables of messages have each field in each of them."""
    form = '[{"role": "user", "content": "..."}, ...]'
    whole = isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
    if not whole or not all(isinstance(each.get("role"), str) for each in value):
        raise UserError(f"{where}: field {field!r} has no messages: they must be {form}")
    return [{key: item for key, item in each.items() if item is not None or key == "content"} for each in value]


def _parsed(tools, where: str) -> list:
    """Tools are a list, which some data sets have as a text."""
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: field 'tools' is not valid JSON: {error}") from None
    if not isinstance(tools, list):
        raise UserError(f"{where}: field 'tools' is a {type(tools).__name__}: it must be a list")
    return tools
