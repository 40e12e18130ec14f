"""`{% generation %}` of a chat template, which marks the answers that a model is trained on."""

from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser


class GenerationTag(Extension):
    """`{% generation %}text{% endgeneration %}` is `text`. As in `transformers`, it is rendered as a call: a variable that
    is set inside has its old value after it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller) -> str:
        return caller()
