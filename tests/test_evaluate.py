"""Evaluation: every token is scored once with the documented context, losses equal brute force, metrics match their
definitions."""

import json
import math
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daily import daily
from tests.data import made_tokenizers
from tests.tiny_runs import ROOT, make_run, tiny_config, tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch import evaluate
from xfresearch.data.pipeline import evaluation_batches, prepare
from xfresearch.evaluation import losses
from xfresearch.evaluation.losses import (
    Window,
    make_evaluator,
    make_scorer,
    pack_windows,
    summary,
    sums_of_batches,
    windows,
)
from xfresearch.loading import loading
from xfresearch.models import reach
from xfresearch.runtime import command
from xfresearch.runtime.errors import UserError
from xfresearch.train import main as train_main

WORDS = "the cat sat on the mat. naïve\n"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Config overrides for a corpus of documents, most of which hash into the train split."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"{number} " + WORDS * (1 + number % 5))
    return {"data__corpus": repr((f"text_files:{folder}",))}


@pytest.fixture(scope="module")
def run(tmp_path_factory, texts):
    return make_run(tmp_path_factory.mktemp("runs") / "a", "moe", **texts, sequence_length=16)


@pytest.fixture(scope="module")
def document_run(tmp_path_factory, texts):
    return make_run(
        tmp_path_factory.mktemp("runs") / "d", "moe", **texts, sequence_length=16, data__packing="documents"
    )


def evaluated(run, *options, tmp_path) -> dict:
    evaluate.main(["--workdir", str(run), "--json", str(tmp_path / "out.json"), *options])
    return json.loads((tmp_path / "out.json").read_text())


def test_error_logs_go_to_the_run_and_not_into_a_checkpoint(run, monkeypatch):
    folders = []

    @contextmanager
    def joined(options, workdir):
        folders.append(workdir)
        yield

    monkeypatch.setattr(evaluate.distributed, "joined", joined)
    monkeypatch.setattr(evaluate, "evaluate", lambda *arguments: None)
    checkpoint = next((run / "checkpoints").iterdir())
    for path in (run, checkpoint):
        evaluate.main(["--workdir", str(path)])
    assert folders == [str(run)] * 2


def brute_force(lm, tokens, start, length) -> float:
    """The loss of tokens[start] alone, with at most `length` tokens of context."""
    context = tokens[max(0, start - length) : start]
    padded = np.zeros((1, 16), np.int32)
    padded[0, : len(context)] = context
    logits_V = np.asarray(lm(padded))[0, len(context) - 1].astype(np.float64)
    return float(np.log(np.exp(logits_V - logits_V.max()).sum()) + logits_V.max() - logits_V[tokens[start]])


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(2, 120), st.integers(1, 20), st.data())
def test_windows_score_every_token_once_with_the_documented_context(start, size, length, data):
    stride = data.draw(st.integers(1, length))
    result = list(windows(start, start + size, length, stride))
    scored = [token for window in result for token in range(window.scored, window.end)]
    assert scored == list(range(start + 1, start + size))
    for window in result:
        assert start <= window.start < window.scored < window.end <= start + size
        assert window.end - window.start - 1 <= length
        assert window.scored - window.start > length - stride or window.start == start


@settings(deadline=None)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=12), st.integers(11, 20), st.integers(1, 4))
def test_rows_contain_every_window_and_never_exceed_their_length(sizes, length, stride):
    ends = np.cumsum(sizes)
    every = [w for end, size in zip(ends, sizes, strict=True) for w in windows(end - size, end, length, stride)]
    rows = list(pack_windows(every, length))
    assert [window for row in rows for window in row] == every
    assert all(0 < sum(w.end - w.start - 1 for w in row) <= length for row in rows)


def test_a_window_batch_contains_the_tokens_of_its_windows():
    tokens = np.arange(100, 140, dtype=np.int32)
    batch = losses.window_batch(tokens, [[Window(3, 5, 8), Window(20, 21, 22)]], 8, 2)
    assert batch["tokens"][0].tolist() == [103, 104, 105, 106, 120, 0, 0, 0]
    assert batch["targets"][0].tolist() == [104, 105, 106, 107, 121, 0, 0, 0]
    assert batch["segments"][0].tolist() == [1, 1, 1, 1, 2, 0, 0, 0]
    assert batch["positions"][0].tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert batch["weights"][0].tolist() == [0, 1, 1, 1, 1, 0, 0, 0]
    assert not any(values[1].any() for values in batch.values())


STRIDES = [("run", 1), ("run", 5), ("document_run", 1), ("document_run", 5)]


@pytest.mark.parametrize("kind, stride", daily([("run", 5), ("document_run", 1)], STRIDES))
def test_a_stride_equals_brute_force(kind, stride, request, tmp_path):
    run = request.getfixturevalue(kind)
    lm = loading.load(run)
    text = losses.read_text(lm, run, length=8, stride=stride)
    scores = losses.score_text(make_scorer(lm.config), lm.params, text, 4)
    starts = np.flatnonzero(np.diff(text.documents, prepend=-1)) if kind == "document_run" else np.array([0])
    assert sorted(np.flatnonzero(scores.row < 0)) == starts.tolist()
    expected, actual = [], []
    for token in np.flatnonzero(scores.row >= 0)[:60]:
        first = starts[starts < token].max()
        # The first window scores 8 tokens, each with all tokens before it. Every later window scores `stride` tokens;
        # the first of them has 9 - stride tokens of context.
        index = token - first
        context = index if index <= 8 else 9 - stride + (index - 9) % stride
        expected.append(brute_force(lm, text.tokens[first : token + 1], index, context))
        actual.append(scores.nll[token])
    assert relative_error(actual, expected) < TOLERANCE["float32"]


@pytest.mark.parametrize("kind", ["run", "document_run"])
def test_a_stride_of_the_whole_length_gives_the_loss_of_training(kind, request, tmp_path):
    run = request.getfixturevalue(kind)
    lm = loading.load(run)
    packed = prepare(lm.run, "validation")
    evaluator = make_evaluator(lm.config, "scan", rows=7)
    trained = summary(sums_of_batches(evaluator, lm.params, evaluation_batches(packed, 3, 0), lm.tokenizer.byte_lengths))
    measured = evaluated(run, tmp_path=tmp_path)
    assert measured["tokens"] == trained["tokens"] == packed.meta["n_predictions"]
    for name in ("loss", "bits_per_byte", "perplexity", "accuracy"):
        assert math.isclose(measured[name], trained[name], rel_tol=TOLERANCE["float32"]), name
    assert measured["bytes"] == trained["bytes"] and measured["unit"] == "documents"


def test_training_and_evaluate_count_the_bytes_of_the_text(texts, tmp_path):
    """The tokenizer puts a space in front of each document, which the text does not have."""
    (tmp_path / "tok.bin").write_bytes(made_tokenizers.llama2c(made_tokenizers.sentence_piece()))
    small = {"steps": 1, "optimizer.warmup": 0, "batch_size": 2, "sequence_length": 16, "evaluation.final_sequences": 0}
    keys = small | {"data.tokenizer": tmp_path / "tok.bin", "data.corpus": texts["data__corpus"], "log.tracker": "jsonl"}
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    run, output = tmp_path / "run", tmp_path / "train.json"
    train_main(["--config", "configs/gpt2.py:tiny", "--workdir", str(run), "--json", str(output), *flags])
    trained, measured = json.loads(output.read_text())["evaluation"], evaluated(run, tmp_path=tmp_path)
    assert trained["tokens"] == measured["tokens"] and trained["bytes"] == pytest.approx(measured["bytes"], rel=1e-3)
    assert trained["bits_per_byte"] == pytest.approx(measured["bits_per_byte"], rel=1e-3)


def test_metrics_match_their_definitions(run, tmp_path):
    measured = evaluated(run, "--per-document", tmp_path=tmp_path)
    lm = loading.load(run)
    text = losses.read_text(lm, run)
    raw = lm.tokenizer.decode_bytes(text.tokens[1:])
    nll = measured["loss"] * measured["tokens"]
    assert measured["tokens"] == len(text.tokens) - 1 and measured["bytes"] == len(raw)
    assert math.isclose(measured["bits_per_byte"], nll / math.log(2) / len(raw), rel_tol=1e-9)
    assert math.isclose(measured["bits_per_character"], nll / math.log(2) / len(raw.decode()), rel_tol=1e-9)
    assert len(raw) > len(raw.decode())
    assert math.isclose(measured["perplexity"], math.exp(measured["loss"]), rel_tol=1e-9)
    documents = measured["documents"]
    assert len(documents) == measured["units"] > 1
    assert sum(d["tokens"] for d in documents) == measured["tokens"]
    assert math.isclose(sum(d["loss"] * d["tokens"] for d in documents), nll, rel_tol=1e-9)
    raw_documents = lm.tokenizer.decode_bytes(text.tokens).decode()
    assert all(d["starts"] and d["starts"] in raw_documents for d in documents)
    residuals = [d["tokens"] * (d["loss"] - measured["loss"]) for d in documents]
    n = len(documents)
    error = math.sqrt(n / (n - 1) * sum(r * r for r in residuals)) / measured["tokens"]
    assert math.isclose(measured["standard_error"], error, rel_tol=1e-6)


def test_the_standard_error_matches_the_spread_of_samples():
    """Over many samples of units with correlated token losses, the error is close to the losses' standard deviation."""
    random = np.random.default_rng(0)
    losses, errors = [], []
    for _ in range(400):
        tokens_U = random.integers(5, 50, 40)
        nll_U = tokens_U * random.normal(3, 0.5, 40)
        sums = {"nll": nll_U, "correct": 0 * nll_U, "tokens": tokens_U, "bytes": tokens_U}
        figures = summary(sums)
        losses.append(figures["loss"])
        errors.append(figures["standard_error"])
    assert 0.9 < np.mean(errors) / np.std(losses) < 1.1


def test_padding_does_not_count():
    lm = tiny_model("moe")
    batch = random_batch()
    batch["segments"][:, 10:] = 0
    batch["weights"][:, 10:] = 0
    batch["segments"][3], batch["weights"][3] = 0, 0
    evaluator = make_evaluator(lm.config)
    first = summary(sums_of_batches(evaluator, lm.params, [batch], lm.tokenizer.byte_lengths))
    for name in ("tokens", "targets"):
        batch[name] = batch[name].copy()
        batch[name][:, 10:] = batch[name][3] = 5
    second = summary(sums_of_batches(evaluator, lm.params, [batch], lm.tokenizer.byte_lengths))
    assert first == second
    assert (first["tokens"], first["units"], first["bytes"]) == (30, 3, 30)


SHARDED = """
import jax, numpy as np
from tests.test_evaluate import random_batch
from tests.tiny_runs import tiny_model
from xfresearch.evaluation.losses import make_evaluator, summary, sums_of_batches
from xfresearch.models import transformer
from xfresearch.sharding.partition import batch_sharding, param_shardings
from xfresearch.sharding.mesh import make_mesh

lm, batch = tiny_model("moe", mesh__fsdp=2), random_batch()
mesh = make_mesh(lm.run)
rows = batch_sharding(mesh)
params = jax.device_put(lm.params, param_shardings(mesh, lm.params, transformer.axes(lm.config)))
evaluator, lengths = make_evaluator(lm.config), lm.tokenizer.byte_lengths
sharded = summary(sums_of_batches(evaluator, params, [jax.device_put(batch, rows)] * 2, lengths))
plain = summary(sums_of_batches(evaluator, lm.params, [batch] * 2, lengths))
assert len(jax.tree.leaves(jax.device_put(batch, rows))[0].sharding.device_set) == 4
assert abs(sharded["loss"] / plain["loss"] - 1) < 1e-5 and sharded["tokens"] == plain["tokens"] == 2 * 4 * 16
"""


def random_batch() -> dict:
    random = np.random.default_rng(0)
    batch = {name: random.integers(0, 257, (4, 16)).astype(np.int32) for name in ("tokens", "targets")}
    batch |= {"positions": np.tile(np.arange(16, dtype=np.int32), (4, 1)), "segments": np.ones((4, 16), np.int32)}
    return batch | {"weights": np.ones((4, 16), np.float32)}


@pytest.mark.long
def test_sharded_batches_have_the_same_sums():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_scorer_never_holds_the_logits_of_all_tokens():
    config = tiny_config("moe", sequence_length=64).model
    config = type(config)(**{**vars(config), "vocab_size": 8192})
    params = jax.eval_shape(lambda: tiny_model("moe").params) | {
        "embed": {"table": jax.ShapeDtypeStruct((8192, 32), "float32")}
    }
    ints = jax.ShapeDtypeStruct((16, 64), jnp.int32)
    batch = {name: ints for name in ("tokens", "targets", "positions", "segments", "weights")}
    memory = make_scorer(config, rows=32).lower(params, batch).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 16 * 64 * 8192 * 4 / 4


def test_without_scored_tokens_metrics_are_nan():
    nothing = losses.summary({name: np.zeros(0) for name in losses.SUMS})
    assert math.isnan(nothing["loss"]) and nothing["tokens"] == 0
    assert losses.perplexity(1000.0) == math.inf


def test_metrics_do_not_depend_on_the_batching_of_rows():
    """The batch size and the number of processes change the order of the units and the rows of padding between them."""
    random, collected = np.random.default_rng(0), set()
    tokens_U = random.integers(20, 65, 11).astype(np.float64)
    sums = {"nll": (tokens_U * random.normal(3, 0.3, 11)).astype(np.float32), "tokens": tokens_U}
    sums |= {"correct": tokens_U // 3, "bytes": 2 * tokens_U}
    for _ in range(50):
        at = random.permutation(16)[:11]
        spread = {name: np.zeros(16, values.dtype) for name, values in sums.items()}
        for name, values in sums.items():
            spread[name][at] = values
        collected.add(json.dumps(losses.summary(spread)))
    assert len(collected) == 1


def test_limit_takes_the_first_sequences(run, tmp_path):
    assert evaluated(run, "--limit", "3", tmp_path=tmp_path)["tokens"] == 48


def test_all_steps_gives_a_curve(run, tmp_path, capsys):
    curve = evaluated(run, "--all-steps", tmp_path=tmp_path)["steps"]
    assert [point["step"] for point in curve] == [10, 20]
    for point in curve:
        alone = evaluated(run, "--step", str(point["step"]), tmp_path=tmp_path)
        assert alone["loss"] == point["loss"]
    assert curve[0]["loss"] != curve[1]["loss"]
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:2] == ["step", "loss"] and len({len(line) for line in table[:3]}) == 1


def test_another_corpus_and_split_can_be_evaluated(run, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("".join(f"line {i}\n" for i in range(400)))
    measured = evaluated(run, "--data", f"text_files:{file}", "--split", "test", tmp_path=tmp_path)
    assert measured["corpus"] == f"text_files:{file}" and measured["split"] == "test"
    assert measured["unit"] == "sequences"


def test_the_worst_documents_come_first(run, tmp_path, capsys):
    evaluate.main(["--workdir", str(run), "--per-document"])
    out = capsys.readouterr().out
    documents = evaluated(run, "--per-document", tmp_path=tmp_path)["documents"]
    worst = max(documents, key=lambda d: d["bits_per_byte"])
    lines = out[out.index("worst documents") :].splitlines()
    assert lines[2].split()[0] == str(worst["document"])


def test_the_curve_skips_a_damaged_step(tmp_path, texts, capsys):
    run = make_run(tmp_path / "a", "moe", steps=(1, 2, 3), **texts, sequence_length=16)
    for path in (run / "checkpoints" / "2").rglob("d/*"):
        path.write_bytes(b"")
    curve = evaluated(run, "--all-steps", tmp_path=tmp_path)["steps"]
    assert [point["step"] for point in curve] == [1, 3]
    assert "checkpoint 2 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, text",
    [
        (["--stride", "17"], "stride 17.*at most the sequence length, 16"),
        (["--stride", "0"], "--stride: 0.* an integer of at least 1"),
        (["--stride", "x"], "--stride: x"),
        (["--batch-size", "-2"], "--batch-size: -2"),
        (["--limit", "-2"], "--limit: -2.* an integer of at least 0"),
        (["--sequence-length", "--1"], "--sequence-length"),
        (["--step", "15"], "no checkpoint of step 15: it has steps 10, 20"),
        (["--step", "10", "--all-steps"], "--step=10 is not allowed with --all-steps"),
        (["--split", "validatoin"], "did you mean 'validation'"),
        (["--data", "text_files:/nowhere/*.txt"], "/nowhere"),
        (["--stepp", "10"], "--stepp"),
        (["--json", "/"], "--json=/ cannot be written"),
        (["--fewshot", "0"], "--fewshot is not allowed without --tasks"),
    ],
)
def test_mistakes_give_one_line_errors(run, options, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.run(evaluate.main, ["--workdir", str(run), *options])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    with pytest.raises(UserError, match=text):
        evaluate.main(["--workdir", str(run), *options])
    assert error.strip().splitlines()[-1].startswith("error: ")


def test_windows_longer_than_the_position_table_raise_an_error(tmp_path, texts):
    run = make_run(tmp_path / "a", "gpt2", steps=(1,), **texts)
    with pytest.raises(UserError, match="sequence length 65.* at most 64"):
        evaluate.main(["--workdir", str(run), "--sequence-length", "65"])


def test_tokens_beyond_the_models_vocabulary_raise_an_error(document_run):
    """Such as a separator that was added to a tokenizer without one."""
    lm = loading.load(document_run)
    lm.config = replace(lm.config, vocab_size=256)
    with pytest.raises(UserError, match="corpus .* has token 256, but the model's vocabulary ends at 255"):
        losses.read_text(lm, document_run)


def test_nan_metrics_are_null_in_json(run, tmp_path):
    measured = evaluated(run, "--limit", "1", tmp_path=tmp_path)
    assert measured["units"] == 1 and measured["standard_error"] is None


def test_evaluation_narrows_windows_to_the_trained_spans(tmp_path, texts, monkeypatch):
    """Adaptive spans of a trained model bound its attention, so narrower windows give the same metrics."""
    lm, run = tiny_model("all_attention_enwik8_small", **texts, sequence_length=256), tmp_path / "s"
    lm.params["blocks"]["main"]["attention"]["span"]["fraction"] *= 0  # each head sees only its ramp of 32 tokens
    lm.save(run)
    executions, make = [], losses.make_scorer
    monkeypatch.setattr(losses, "make_scorer", lambda *given: executions.append(given[-1]) or make(*given))
    trimmed = evaluated(run, "--limit", "2", tmp_path=tmp_path)
    monkeypatch.setattr(reach, "trained_reach", lambda model, params: ())
    whole = evaluated(run, "--limit", "2", tmp_path=tmp_path)
    assert [execution.reach_of("main") for execution in executions] == [64, 0]
    assert math.isclose(trimmed["loss"], whole["loss"], rel_tol=TOLERANCE["float32"])
