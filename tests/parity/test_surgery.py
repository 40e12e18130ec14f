"""Converted models, exported as Hugging Face folders: `transformers` computes the logits of the model before surgery."""

import numpy as np
import pytest

from tests.parity.weights import MISSING
from tests.tolerances import relative_error

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

import xfresearch as xf  # noqa: E402
from tests.parity import hf_torch  # noqa: E402
from tests.parity.hf_draws import DRAWS, LENGTH, Draw  # noqa: E402
from xfresearch import surgery  # noqa: E402
from xfresearch.interop.family import Unsupported  # noqa: E402

pytestmark = pytest.mark.parity

CASES = [("gpt2", "untie"), ("mixtral", "expand_groups")]
CASES += [("llama", name) for name in ("expand_groups", "upcycle", "stack")]


@pytest.mark.parametrize(("family", "conversion"), CASES)
def test_transformers_reads_what_a_conversion_made(family, conversion, tmp_path, parity):
    """The first draw of the family that the conversion applies to, and whose result some family can express: Mixtral has no
    biases of attention, and some Llamas have."""
    for number in range(20):
        config = DRAWS[family](Draw(number))
        hf_torch.write_random(config, tmp_path / f"in{number}", seed=number, dtype="float64")
        lm = xf.load(tmp_path / f"in{number}")
        try:
            new, certificate = getattr(surgery, conversion)(lm)
            new.export_hf(tmp_path / "out", dtype="float64")
        except (surgery.Refused, Unsupported):
            continue
        assert certificate.exact
        tokens_BL = np.random.default_rng(number).integers(0, config.vocab_size, (2, LENGTH))
        expected = hf_torch.logits(tmp_path / f"in{number}", tokens_BL, "float64")
        actual = hf_torch.logits(tmp_path / "out", tokens_BL, "float64")
        parity("transformers", f"{family}, {conversion}", "float64", relative_error(actual, expected))
        return
    pytest.fail(f"{conversion} applies to no draw of {family}")
