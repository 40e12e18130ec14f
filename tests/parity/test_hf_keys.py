"""Every key that `transformers` reads of a family's config.json, changed one at a time: our logits equal those of
`transformers`, or the folder is refused in one line. A key whose change `transformers` itself cannot run is skipped."""

import json
import shutil

import numpy as np
import pytest

from tests.parity.weights import MISSING
from tests.tolerances import TOLERANCE, relative_error

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

import xfresearch as xf  # noqa: E402
from tests.parity import hf_torch  # noqa: E402
from tests.parity.hf_draws import DRAWS, LENGTH, MASKED, Draw  # noqa: E402

pytestmark = pytest.mark.parity

WORDS = {"silu": "gelu", "gelu": "relu", "gelu_new": "relu", "relu": "gelu_new", "gelu_pytorch_tanh": "silu"}
# Settings of loading and of the library itself.
NOT_OF_THE_MODEL = {"dtype", "torch_dtype", "transformers_version", "architectures", "model_type", "_name_or_path"}
NEVER_SET = {"rope_theta": 123.0, "partial_rotary_factor": 0.5, "rotary_pct": 0.5, "sliding_window": 3}
NEVER_SET |= {"sliding_window_pattern": 2, "rope_local_base_freq": 77.0, "num_attention_heads": 1, "num_hidden_layers": 1}
NEVER_SET |= {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}


def changes_of(config: dict) -> dict:
    """{name of a change: the changed config.json}."""
    configs = {}
    for key, value in config.items():
        if key not in NOT_OF_THE_MODEL:
            configs |= {f"{key}={new!r}": config | {key: new} for new in others(value)}
            configs[f"{key} missing"] = {name: each for name, each in config.items() if name != key}
            if isinstance(value, dict):
                configs |= {f"{key}.{name}": config | {key: new} for name, new in changes_of(value).items()}
    return configs | {f"{key} added": config | {key: new} for key, new in NEVER_SET.items() if key not in config}


def others(value) -> list:
    """Other values of the same type, and null."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int | float):
        return [value * 2, value / 2 if isinstance(value, float) else max(value - 1, 0), None]
    if isinstance(value, str):
        return [WORDS.get(value, value + "_x"), None]
    if isinstance(value, list):
        return [value[::-1], [], None]
    return [None] if isinstance(value, dict) else [1, 0.5, True]


@pytest.mark.parametrize("name", [*DRAWS, *MASKED])
def test_a_changed_key_is_obeyed_or_refused(name, tmp_path):
    folder = tmp_path / "model"
    hf_torch.write_random((DRAWS | MASKED)[name](Draw(1)), folder, seed=1, dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    tokens_BL = np.random.default_rng(1).integers(2, config["vocab_size"], (1, LENGTH))  # 1 is RoBERTa's padding
    wrong, compared = [], 0
    for what, changed in changes_of(config).items():
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            actual = np.asarray(xf.load(folder)(tokens_BL))
        except xf.UserError as error:
            assert "\n" not in str(error)
            continue
        try:
            expected = hf_torch.logits(folder, tokens_BL, "float32")
        except Exception:  # its own checks raise many types
            continue
        if not np.isfinite(expected).all():
            continue
        compared += 1
        if expected.shape != actual.shape or relative_error(actual, expected) > TOLERANCE["float32"]:
            wrong.append(what)
    shutil.rmtree(folder)
    assert compared > 10
    assert not wrong
