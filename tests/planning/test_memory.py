"""Memory of an update: what layers keep for the backward pass."""

import re
from collections import Counter

import pytest

from tests.contracts.variants import ROOT
from xfresearch.config.files import parse
from xfresearch.planning import formula, program

ALONE = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1, "context": 1}


@pytest.mark.parametrize(
    "name, hidden, stream",
    [("gpt2", 2, 5), ("llama", 3, 5), ("gptj", 2, 3), ("dyt", 3, 5), ("no_query", 2, 5)],
)
def test_scanned_layers_keep_the_operands_of_products_and_of_norms(name, hidden, stream):
    """Arrays [B, L, F]: what the activation reads and what W_down reads; a gated activation reads two. [B, L, D]: what each
    of two norms reads and returns, and the heads. No value between them, and nothing in float32."""
    overrides = ["--config.model.vocab_size=264", "--config.model.dtype=bfloat16", "--config.sequence_length=48"]
    config = program.prepare(parse(["--config", f"{ROOT}/configs/{name}.py:tiny", *overrides]))
    shapes = [shape for _, shape, _ in formula.estimate_step(config, ALONE).kept]
    kept = [re.fullmatch(r"8 x (\w+)\[2, (?:1, )?48, (\d+)\]", shape) for shape in shapes]
    counted = Counter((found[1], int(found[2])) for found in kept if found and found[2] != "1")
    F = config.model.blocks["main"].feed_forward.hidden
    assert counted == {("bfloat16", F): hidden, ("bfloat16", config.model.width): stream}
