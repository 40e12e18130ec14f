"""The lines that a run prints first: their words, and where they appear."""

import json
from dataclasses import replace

import jax
import pytest

from tests.tiny_runs import ROOT, tiny_config
from xfresearch.data.pipeline import Batches, prepare
from xfresearch.models.words import blocks_in_words, model_line
from xfresearch.sharding.mesh import make_mesh
from xfresearch.train import main as train_main
from xfresearch.training import outline
from xfresearch.training.kernel_choices import kernel_choices

GPT2 = f"{ROOT}/configs/gpt2.py:tiny"
MAIN = "model__blocks__main__"

WORDS = [
    ({}, "2 x pre-norm [LayerNorm, 4 heads of 8, biases, GELU (tanh) 128, biases]"),
    (
        {MAIN + "attention__kv_heads": 2, MAIN + "attention__position": "rope", "model__position": "none"},
        "2 x pre-norm [LayerNorm, 4 heads of 8 on 2 key-value heads with RoPE, biases, GELU (tanh) 128, biases]",
    ),
    (
        {MAIN + "norm": "dyt", MAIN + "attention__memory_slots": 3, MAIN + "attention__softcap": 5.0},
        "2 x pre-norm [DyT, 4 heads of 8, 3 memory slots, biases, softcap=5.0, GELU (tanh) 128, biases]",
    ),
    (
        {MAIN + "norms__feed_forward_in__kind": "rms", MAIN + "feed_forward__kind": "swiglu"},
        "2 x pre-norm [LayerNorm and RMSNorm, 4 heads of 8, biases, SwiGLU 128, biases]",
    ),
    (
        {MAIN + "norm": "derf", MAIN + "layout": "attention_only"},
        "2 x attention-only [Derf, 4 heads of 8, biases]",
    ),
    ({MAIN + "layout": "attention_only"}, "2 x attention-only [LayerNorm, 4 heads of 8, biases]"),
]


@pytest.mark.parametrize(("options", "words"), WORDS)
def test_blocks_in_words(options, words):
    assert blocks_in_words(tiny_config(**options).model) == words


KINDS = [
    ("moe", "top-2 of 8 experts of SwiGLU 32"),
    ("lambda_lm", "lambda heads with keys of"),
    ("variants", "4 heads of 8"),
]


@pytest.mark.parametrize(("name", "words"), KINDS)
def test_other_kinds_in_words(name, words):
    assert words in blocks_in_words(tiny_config(name).model)


def test_patterns_and_segments_in_words():
    config = tiny_config()
    main = config.model.blocks["main"]
    blocks = {"main": main, "other": replace(main, norm="rms")}
    paired = replace(config.model, blocks=blocks, pattern=("main", "other"), depth=4)
    words = blocks_in_words(paired)
    assert words.startswith("2 x (pre-norm [LayerNorm,") and ", then pre-norm [RMSNorm," in words and words.endswith("])")
    first = replace(config.model, blocks=blocks, segments=((("other",), 1), (("main",), 3)), depth=4)
    words = blocks_in_words(first)
    assert words.startswith("1 x pre-norm [RMSNorm,") and ", then 3 x pre-norm [LayerNorm," in words


def test_the_lines_have_the_figures_of_the_run(tmp_path):
    (tmp_path / "notes.txt").write_text("some text\n" * 1000)
    config = tiny_config(data__corpus=f"('text_files:{tmp_path}/notes.txt',)", evaluation__split="train")
    batches, held_out = Batches(config), prepare(config, "train")
    data = outline.data_line(config, batches.corpora, held_out)
    assert "notes.txt: 9 kB, 9 k tokens in 140 sequences to train on" in data and "tokenizer bytes" in data
    model = model_line(config.model, config.sequence_length)
    assert model.startswith("35.7 k parameters, ") and "FLOPs per token; width 32" in model
    mesh = make_mesh(config)
    assert outline.devices_line(config, mesh).startswith(f"{jax.device_count()} x {jax.devices()[0].device_kind}")
    execution = outline.execution_line(config, mesh, kernel_choices(config, mesh))
    assert execution.startswith("attention: plain (skipping masked keys saves less") and "; layers: unroll (" in execution
    assert "; loss of 1,024 tokens at a time (" in execution and "vocabulary" not in execution
    assert "runs/a: config.json" in outline.output_line(config, "runs/a")
    apart = outline.output_line(tiny_config(checkpoint__every=15, checkpoint__seconds=60.0), "runs/a")
    assert "checkpoints/ every 15 updates and at least 60 s apart" in apart
    updates = f"{config.steps:,} updates of {config.batch_size} x {config.sequence_length} tokens"
    assert outline.optimizer_line(config).endswith(updates)


def test_print_config_prints_every_key_and_trains_nothing(tmp_path, capsys):
    train_main(["--config", GPT2, "--workdir", str(tmp_path / "run"), "--config.steps=7", "--print-config"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["steps"] == 7 and printed["model"]["blocks"]["main"]["attention"]["heads"] == 4
    assert not (tmp_path / "run").exists()


def test_a_run_prints_its_stages_and_its_outline_first(tmp_path, capsys):
    """Standard error is no terminal: one line for each stage, then the outline, then the compilation, then the steps."""
    (tmp_path / "notes.txt").write_text("".join(f"line {number} of the notes\n" for number in range(4000)))
    options = ["--config.data.tokenizer=bpe", "--config.data.bpe_vocab=300", "--config.steps=2"]
    options += ["--config.evaluation.every=0", "--config.optimizer.warmup=0"]
    corpus = [f"--config.data.corpus=('text_files:{tmp_path}/notes.txt',)", f"--config.data.cache_dir={tmp_path}/cache"]
    train_main(["--config", GPT2, "--workdir", str(tmp_path / "run"), *options, *corpus])
    out, err = capsys.readouterr()
    starts = ["training a BPE tokenizer of 300 ids: ", "preparing ", "model  ", "data  ", "optimizer  "]
    starts += ["devices  ", "output  ", "making the state", "compiling the update: ", "step 1/2"]
    lines = err.splitlines()
    found = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in starts]
    assert found == sorted(found) and len(lines) < 25, err
    account = next(line for line in out.splitlines() if line.startswith("time "))
    assert all(f" {kind} " in account for kind in ("data", "compile", "start", "results"))
