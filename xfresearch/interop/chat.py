"""The chat template of a Hugging Face folder: Jinja that turns messages into the text that the model was trained on."""

import json
from collections.abc import Sequence
from datetime import datetime

from xfresearch.interop.source import object_in
from xfresearch.runtime.errors import UserError

FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")  # the first with a template counts


def render(files: dict[str, bytes], messages: Sequence[dict]) -> str:
    """The text of `messages`, [{"role": "user", "content": "..."}], up to where the answer begins.

    `files` are those of the folder, by name. As in `transformers`, the template runs in Jinja's sandbox, and sees the
    names of the special tokens. Raises UserError if there is no template, or if it cannot be rendered.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    tags = ["jinja2.ext.loopcontrols", "xfresearch.interop.generation_tag.GenerationTag"]
    options = {"trim_blocks": True, "lstrip_blocks": True, "extensions": tags}
    environment = ImmutableSandboxedEnvironment(**options)
    environment.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    name, template = _template(files)
    try:
        text = environment.from_string(template)
        return text.render(messages=list(messages), add_generation_prompt=True, tools=None, **_special_tokens(files))
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{name}: the chat template cannot be rendered: {reason}") from None


def _refuse(message: str):
    from jinja2 import TemplateError

    raise TemplateError(message)


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
