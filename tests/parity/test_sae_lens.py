"""SAELens reads the folders of dictionaries that `features` writes: it encodes and decodes as we do."""

import numpy as np
import pytest

from tests.parity.weights import MISSING
from tests.tiny_runs import tiny_model
from tests.tolerances import relative_error

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
sae_lens = pytest.importorskip("sae_lens", reason=MISSING.format("sae-lens"))

from xfresearch import analysis  # noqa: E402
from xfresearch.analysis import sparse  # noqa: E402

pytestmark = pytest.mark.parity

TAPS = {
    "autoencoder": {"tap": "blocks.0.feed_forward.residual"},
    "heads": {"tap": "blocks.0.attention.heads"},
    "transcoder": {"tap": "blocks.1.feed_forward.in", "target": "blocks.1.feed_forward.out"},
    "wider": {"tap": "blocks.1.feed_forward.in", "target": "blocks.1.feed_forward.hidden"},
}
HOOK_OUT = {"transcoder": "blocks.1.hook_mlp_out", "wider": "blocks.1.mlp.hook_mid"}


@pytest.mark.parametrize("name", TAPS)
def test_sae_lens_reads_a_dictionary(name, tmp_path, parity):
    lm = tiny_model("gpt2")
    training, tokens_BL = (np.random.default_rng(seed).integers(257, size=(32, 16)) for seed in range(2))
    taps = TAPS[name]
    result = analysis.features(lm, tokens_BL, sizes=(48,), k=4, steps=30, training=training, **taps)
    result.save(tmp_path)
    theirs = sae_lens.SAE.load_from_disk(str(tmp_path / "dictionary_48"))
    assert theirs.cfg.metadata.tap == taps["tap"]
    assert theirs.cfg.metadata.hook_name_out == HOOK_OUT.get(name)
    x = np.array(lm.capture(tokens_BL, taps["tap"])[taps["tap"]])  # [B, L, D], of heads [B, L, H, K]
    x_BLD = x.reshape(*tokens_BL.shape, -1)
    with torch.no_grad():
        f_BLF = theirs.encode(torch.tensor(x))
        y_BLE = theirs.decode(f_BLF).numpy().reshape(*tokens_BL.shape, -1)
    arrays = [result.data[f"48/{each}"] for each in sparse.Dictionary._fields]
    ours = sparse.Dictionary(*arrays)
    expected = sparse.encode(ours, x_BLD)
    assert (f_BLF > 0).sum() > 100
    parity("sae-lens", f"{name}, coefficients", "float32", relative_error(f_BLF.numpy(), expected))
    parity("sae-lens", f"{name}, prediction", "float32", relative_error(y_BLE, sparse.decode(ours, expected)))
