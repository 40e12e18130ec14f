"""A run imports what it uses: of families of folders, data sets, tokenizers, objectives and kernels, only its own."""

import json
import os
import subprocess
import sys

from tests.tiny_runs import ROOT
from xfresearch.data.labels import DATA_SETS
from xfresearch.interop.families import NAMES

# Modules of xfresearch in a run of five steps; each takes time at every start. They were 217 when this test was written;
# shards, corpora of token ids, adapters and the cards of notebooks are the others.
MOST = 230
CODE = """
import json, sys
import xfresearch as xf
from xfresearch.train import main

loaded = lambda: [name for name in sys.modules if name.split(".")[0] == "xfresearch"]
main(sys.argv[1:])
trained = loaded()
lm = xf.load("run")
read = loaded()
lm.export_hf("folder", family="llama")
xf.load("folder")
print(json.dumps([trained, read, loaded()]))
"""


def test_a_run_imports_what_it_uses(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(40):
        (corpus / f"{number}.txt").write_text(f"{number} little words of a text. " * 50)
    given = ["--config", "quickstart:tiny", "--workdir", "run", "--config.steps=5", f"--config.data.corpus=('{corpus}',)"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CODE, *given, "--config.evaluation.sequences=8", "--config.model.depth=1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    trained, read, converted = map(set, json.loads(done.stdout.splitlines()[-1]))
    families = {f"xfresearch.interop.{name}" for name in NAMES}
    others = {place.split(":")[0] for place in DATA_SETS.values()}
    others |= {f"xfresearch.data.tokenizers.{name}" for name in ("hugging_face", "llama2c", "sentence_piece", "word_piece")}
    others |= {f"xfresearch.data.{name}" for name in ("facts", "objectives.masked", "pairs.pair_files")}
    others |= {"xfresearch.kernels.cudnn_attention", "xfresearch.kernels.splash_attention"}
    assert not read & (families | others | {"xfresearch.interop.importing", "xfresearch.interop.exporting"})
    assert converted & families == {"xfresearch.interop.llama"}
    assert len(trained) <= MOST
    assert "xfresearch.loading.loading" not in trained  # it is of models to start from
