"""Texts of edits and the model's table of positions: those that just fit are read, longer ones are an error."""

import numpy as np
import pytest

from tests.tiny_runs import tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch import UserError
from xfresearch.data.records import Record
from xfresearch.editing import memit, rome
from xfresearch.editing.keys import keys_of
from xfresearch.editing.memit import streams
from xfresearch.editing.optimise import Settings, delta_for
from xfresearch.editing.texts import check_fit, fitting, prompts_after

MEMORY, ROWS = "blocks.1.feed_forward", 20
FITS = Record("Ada", "the {} is in a bb", "a", "b")  # 17 bytes, and a start: padded to 24
PREFIX = "x. "


@pytest.fixture(scope="module", params=["learned", "relative_key"])
def lm(request):
    changes = {"model__position": "none", "model__blocks__main__attention__position": "relative_key"}
    changes = changes if request.param == "relative_key" else {}
    return tiny_model("gpt2", model__max_length=ROWS, sequence_length=ROWS, **changes)


def test_padding_ends_with_the_table(lm):
    """The same numbers as without padding."""
    rows, is_object_NL = fitting(lm, prompts_after(lm, FITS, [""]))
    tokens_NL = rows.tokens_NL
    assert tokens_NL.shape == is_object_NL.shape == (1, ROWS) and is_object_NL.sum() == 2
    prompt = prompts_after(lm, FITS, [""])[0]
    for site, result in {
        "coefficients": keys_of(lm, MEMORY, FITS, [""])[0, 0],
        "residual": streams(lm, MEMORY, "residual", [FITS])[0],
    }.items():
        value = lm.capture(np.array([prompt.tokens]), f"{MEMORY}.{site}")[f"{MEMORY}.{site}"][0, prompt.last]
        assert relative_error(result, value) < 10 * TOLERANCE["float32"]
    result = delta_for(lm, MEMORY, [FITS], [""], Settings(steps=1))
    expected = float(np.mean(lm.loss(f"{FITS.text} b")[0, -2:]))
    assert result.losses[0] == pytest.approx(expected, rel=1e-5) and result.delta_D.shape == (32,)


def test_a_text_beyond_the_table_is_one_line(lm):
    for read in (lambda *of: keys_of(*of), lambda lm, memory, record, prefixes: delta_for(lm, memory, [record], prefixes)):
        with pytest.raises(UserError, match=f"^sequence length .* is not allowed: it must be at most {ROWS}, by the model"):
            read(lm, MEMORY, FITS, ["", PREFIX])
    with pytest.raises(UserError) as caught:
        check_fit(lm, [FITS._replace(prompt="{} is"), FITS], ["", PREFIX])
    assert str(caught.value).startswith("request 1, 'the Ada is in a bb', after a prefix that the model wrote: sequence len")
    check_fit(lm, [FITS], [""])


@pytest.mark.parametrize("method", [rome, memit])
def test_nothing_is_computed_for_a_text_beyond_the_table(method, lm, monkeypatch):
    memory = {"memory": MEMORY} if method is rome else {"memories": [MEMORY]}
    with pytest.raises(UserError, match="^request 0, .*, after a prefix that the model wrote: sequence length"):
        method(lm, [FITS], **memory)  # C would need a corpus, which is not here
