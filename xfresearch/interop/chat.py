"""The chat template of a Hugging Face folder: Jinja that turns messages into the text that the model was trained on."""

import json
from collections.abc import Sequence

from xfresearch.interop.source import object_in
from xfresearch.runtime import confined
from xfresearch.runtime.errors import UserError

FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")  # the first with a template counts
SECONDS, MEMORY = 2, 1 << 28  # of processor time, and bytes, to render a template


def render(files: dict[str, bytes], messages: Sequence[dict]) -> str:
    """The text of `messages`, [{"role": "user", "content": "..."}], up to where the answer begins.

    `files` are those of the folder, by name. As in `transformers`, the template runs in Jinja's sandbox, and sees the
    names of the special tokens; here it runs in another process, with limits of time and memory. Raises UserError if there
    is no template, or if it cannot be rendered.
    """
    name, template = _template(files)
    seen = {"messages": list(messages), "add_generation_prompt": True, "tools": None, **_special_tokens(files)}
    try:
        request = json.dumps([template, seen]).encode()
        return json.loads(b"".join(confined.ask("xfresearch.interop.rendering", request, SECONDS, MEMORY)))
    except confined.Failed as error:
        raise UserError(f"{name}: the chat template cannot be rendered: {error}") from None


def _template(files: dict[str, bytes]) -> tuple[str, str]:
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


def _special_tokens(files: dict[str, bytes]) -> dict[str, str]:
    """{'bos_token': '<s>', ...}."""
    values = object_in(files, "special_tokens_map.json") | object_in(files, "tokenizer_config.json")
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in contents.items() if key.endswith("_token") and isinstance(value, str)}
