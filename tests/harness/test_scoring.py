"""Batched log-likelihoods, and texts up to stop strings: each request has the same result as alone."""

import os
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts import two_stacks
from tests.tiny_runs import ROOT, rough_params, tiny_config, tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch import LanguageModel
from xfresearch.harness import generating, scoring
from xfresearch.harness.scoring import Window, continuation_windows
from xfresearch.runtime.errors import UserError

LENGTH = 64  # rows of the tiny model's position table


@pytest.fixture(scope="module")
def lm():
    return tiny_model("gpt2")


def requests(count: int = 40, longest: int = 90, seed: int = 0) -> list[list[Window]]:
    """Requests of random lengths, some longer than the model's longest input."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, (longest, 12), (count, 2))
    return [
        continuation_windows(random.integers(0, 257, a).tolist(), random.integers(0, 257, b).tolist(), LENGTH)
        for a, b in sizes
    ]


def scored(lm, asked, batch_size: int = 4, mesh=None, params=None) -> list:
    scorer = scoring.make_scorer(lm.config, 100, mesh)
    scores = {}
    for done in scoring.score(scorer, params or lm.params, asked, LENGTH, batch_size, mesh):
        assert not scores.keys() & dict(done).keys()
        scores |= done
    return [scores[number] for number in range(len(asked))]


def alone(lm, windows: list[Window]) -> tuple[float, bool]:
    """The reference: from the logits of one window at a time, padded to one length, in float64."""
    total, greedy = 0.0, True
    for tokens, count, _ in windows:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens) - 1] = tokens[:-1]
        logits = np.asarray(lm(padded))[0, len(tokens) - 1 - count : len(tokens) - 1].astype(np.float64)
        targets = tokens[len(tokens) - count :]
        lse = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        total += (logits[np.arange(count), targets] - lse).sum()
        greedy &= (logits.argmax(-1) == targets).all()
    return total, bool(greedy)


def test_each_request_has_the_same_log_likelihood_as_alone(lm):
    asked = requests()
    start = asked[0][0].tokens[:20]
    likeliest = int(np.asarray(lm([start]))[0, -1].argmax())
    asked += [[Window([*start, token], 1)] for token in (likeliest, 5, 6)]  # these share a row
    asked += [[Window([*start, likeliest], 2)], [Window(start, 0)], []]  # shares it too; the last two have no targets
    actual, expected = scored(lm, asked), [alone(lm, windows) for windows in asked]
    assert relative_error([x for x, _ in actual], [x for x, _ in expected]) < TOLERANCE["float32"]
    assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]
    assert actual[40][1] and not actual[41][1] and actual[-2:] == [(0.0, True)] * 2


def test_windows_with_the_same_inputs_share_a_row():
    same = [[Window([1, 2, 3, token], 1)] for token in range(9)] + [[Window([1, 2, 3, 4], 3)]]
    (row,) = scoring.make_rows(same)
    assert row.inputs == (1, 2, 3) and row.target_count == 12
    assert len(scoring.make_rows([*same, [Window([1, 2, 4, 4], 1)]])) == 2


def test_batches_come_longest_first_in_few_sizes():
    result = list(scoring.batches(requests(300, 60), LENGTH, batch_size=4))
    assert [len(row.inputs) for rows, _ in result[:1] for row in rows][0] == max(
        len(row.inputs) for rows, _ in result for row in rows
    )
    shapes = {shape for _, shape in result}
    assert len(shapes) <= 4  # 32 or 64 tokens, 4 or 16 targets
    for rows, (count, tokens, targets) in result:
        assert len(rows) <= count and count * tokens <= 4 * LENGTH
        assert all(len(row.inputs) <= tokens and row.target_count <= targets for row in rows)


def test_a_model_with_a_long_context_has_batches_that_fit():
    """A batch with the tokens of 4 sequences of 131,072 would not fit into a device's memory, and items are short."""
    (rows, (count, tokens, _)), *_ = scoring.batches(requests(3000, 30), 131072, batch_size=4)
    assert tokens == 64 and len(rows) <= count == 4 * 2048 // 64


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 16))
def test_windows_predict_each_token_once_with_the_longest_context_that_fits(before, size, length):
    tokens = list(range(before + size))
    result = continuation_windows(tokens[:before], tokens[before:], length)
    predicted = [token for window in result for token in window.tokens[len(window.tokens) - window.scored :]]
    assert sorted(predicted) == tokens[before:]
    for window in result:
        assert 0 <= window.scored <= len(window.tokens) - 1 <= length or not size
        assert window.tokens == tokens[window.tokens[0] : window.tokens[-1] + 1]  # consecutive tokens
        assert window.tokens[0] == 0 or len(window.tokens) == length + 1  # shortened only if it does not fit


SHARDED = """
import jax
from tests.harness.test_scoring import prompts, requests, scored
from tests.tiny_runs import tiny_model
from xfresearch.harness import generating
from xfresearch.models.transformer import abstract_params
from xfresearch.sharding.mesh import make_mesh

lm = tiny_model("gpt2", mesh__fsdp=2)
mesh = make_mesh(lm.run)
params = jax.device_put(lm.params, jax.tree.map(lambda leaf: leaf.sharding, abstract_params(lm.config, mesh)))
asked = requests(20, 30)
for (a, greedy), (b, same) in zip(scored(lm, asked, 3), scored(lm, asked, 3, mesh, params), strict=True):
    assert abs(a / b - 1) < 1e-5 and greedy == same
plain = [part for done in generating.generate(lm, prompts(), 2) for part in done]
lm.params = params
sharded = [part for done in generating.generate(lm, prompts(), 2, mesh) for part in done]
assert plain == sharded and len(dict(plain)) == 3 and all(dict(plain).values())
"""


@pytest.mark.long
def test_sharded_batches_have_the_same_log_likelihoods_and_texts():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def prompts(**changes) -> list[generating.Request]:
    settings = {"until": [], "max_gen_toks": 20} | changes
    texts = ("a", "the cat sat", "x" * 60)
    return [generating.make_request(list(text.encode()), settings, LENGTH) for text in texts]


def generated(lm, asked) -> list[str]:
    return [text for _, text in sorted(part for done in generating.generate(lm, asked, 2) for part in done)]


def test_each_text_is_that_of_its_prompt_alone_up_to_a_stop_string(lm):
    free = generated(lm, prompts())
    texts = ("a", "the cat sat", "x" * 44)  # the last prompt is shortened to leave 20 tokens for the answer
    assert free == [lm.generate(text, 20, temperature=0.0) for text in texts]
    stop = free[0][7:9]
    expected = [text.split(stop)[0] for text in free]
    assert generated(lm, prompts(until=["", "never", stop])) == expected != free


def test_decoding_ends_once_every_text_has_ended(lm, monkeypatch):
    """The first text ends with an end-of-text token, the second with a stop string. The other two rows are padding."""
    chunks, seen = [[[97] * 16] * 4, [[98] * 3, [99] * 16, [97] * 16, [97] * 16], [[], [97] * 16] * 2], []
    monkeypatch.setattr(generating.decoding, "generate", lambda *_, **__: (seen.append(c) or c for c in chunks))
    asked = [request._replace(stops=("c",)) for request in [*prompts(), *prompts()][:3]]
    assert generating.complete(lm, asked[:2], 48, (), 0) == ["a" * 16 + "bbb", "a" * 16] and len(seen) == 2


@pytest.mark.parametrize("count", [6, 20])
def test_forced_tokens_are_those_of_a_text_alone(count, monkeypatch):
    lm = tiny_model("tasks/reverse", source_length=24, sequence_length=24)
    monkeypatch.setattr(lm.tokenizer, "forced", (ord("<"), ord(">")))
    sources = [[*source, 256] for source in (b"abc", b"d", b"efg")]
    asked = [generating.make_request([256], {"until": [], "max_gen_toks": count}, 24)] * 3
    texts = dict(part for done in generating.generate(lm, asked, 2, sources=sources) for part in done)
    assert [texts[i] for i in range(3)] == lm.generate(source=sources, max_new_tokens=count, temperature=0.0)
    assert all(text.startswith("<") for text in texts.values()) and any(text.endswith(">") for text in texts.values())


def test_texts_are_sampled_if_the_temperature_is_not_zero(lm):
    sampled = generated(lm, [*prompts(temperature=2.0), *prompts(temperature=2.0)])
    assert sampled[0] != sampled[3] and sampled != generated(lm, [*prompts(), *prompts()])


def test_an_answer_as_long_as_the_longest_input_raises_an_error():
    with pytest.raises(UserError, match="max_gen_toks=64 of a task.* below 64"):
        prompts(max_gen_toks=64)


def test_logits_are_computed_only_at_predicted_tokens():
    """16 rows of 64 tokens have 16 predicted tokens. Logits of all tokens would need 64 times as much memory."""
    lm = tiny_model("gpt2")
    params = jax.eval_shape(lambda: lm.params) | {"embed": {"table": jax.ShapeDtypeStruct((8192, 32), "float32")}}
    arrays = scoring.make_batch([scoring.TokenRow((1,) * 64, [(0, [1])])], 16, 64, 4)
    config = type(lm.config)(**{**vars(lm.config), "vocab_size": 8192})
    memory = scoring.make_scorer(config, 10**6).lower(params, *arrays).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 16 * 64 * 8192 * 4 / 4


def test_targets_of_sources_have_the_same_log_likelihood_as_alone():
    """Sources of different lengths are padded; equal targets of two sources are two rows."""
    config = replace(two_stacks.MODELS["pre-norm"], vocab_size=64)
    lm = LanguageModel(config, rough_params(config), None, tiny_config("tasks/reverse"))
    random = np.random.default_rng(0)
    asked, expected = [], []
    for number in range(6):
        source, target = random.integers(0, 64, 2 + number % 4), [3, *random.integers(0, 64, 1 + number % 3)]
        target = [3, 5, 7] if number > 3 else target
        asked.append([Window(list(map(int, target)), len(target) - 1, tuple(map(int, source)))])
        expected.append(-float(np.asarray(lm.loss([target], source=source[None]), np.float64).sum()))
    assert expected[4] != expected[5]
    assert relative_error([total for total, _ in scored(lm, asked)], expected) < TOLERANCE["float32"]
