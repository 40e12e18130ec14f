"""Renders a chat template in a child process of confined.py: Jinja's sandbox ends no loop and bounds no text.

A request is JSON: the source of the template, names that it sees with their values, the date or '', and for each
conversation its own names and the parts to render: numbers of messages, and whether the answer begins after them. The answer
has a line of JSON for each conversation: its texts, or a message if the template refuses it.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache

from jinja2 import Template, TemplateError
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST = 1 << 24  # characters of a text; the longest contexts have a tenth of it


class GenerationTag(Extension):
    """`{% generation %}text{% endgeneration %}` is `text`, an answer that a model is trained on. As in `transformers`, it is
    rendered as a call: a variable that is set inside has its old value after it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller) -> str:
        return caller()


def answers(request: bytes) -> Iterator[bytes]:
    source, values, today, conversations = json.loads(request)
    template = _compiled(source)
    if today:
        values["strftime_now"] = datetime.fromisoformat(today).strftime
    for own, parts in conversations:
        yield json.dumps(_texts(template, values | own, parts)).encode() + b"\n"


def _texts(template: Template, values: dict, parts: list) -> list[str] | str:
    texts = []
    try:
        for count, begins in parts:
            seen = {"tools": None, **values, "messages": values["messages"][:count], "add_generation_prompt": begins}
            texts.append(template.render(seen))
    except MemoryError:
        raise
    except Exception as error:  # of the template's code
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    if (length := max(map(len, texts), default=0)) > MOST:
        return f"its text has {length:,} characters, which must be at most {MOST:,}"
    return texts


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    tags = ["jinja2.ext.loopcontrols", GenerationTag]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=tags)
    environment.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


def _refuse(message: str):
    raise TemplateError(message)
