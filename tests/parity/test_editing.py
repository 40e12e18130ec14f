"""ROME and causal tracing of GPT-2 equal the published definitions (Meng et al. 2022), written in PyTorch.

The definitions read and change a model of `transformers` through hooks, in float64, one prompt at a time:

    k*      mean over the prefixes of the input of mlp.c_proj at the last token of the subject
    C       E[k k^T] over the tokens of a corpus
    delta   torch.optim.Adam on a vector that a hook adds to the output of mlp at the last token of the subject
    edit    W + (C^-1 k*) delta^T / (k*^T C^-1 k*), with a ridge on C
    trace   one pass for each layer, position and draw of the noise
"""

from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

import numpy as np
import pytest

from tests.parity.weights import MISSING

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

import xfresearch as xf  # noqa: E402
from tests.parity import hf_torch  # noqa: E402
from tests.parity.hf_draws import DRAWS, ROUNDS, Draw  # noqa: E402
from tests.tolerances import TOLERANCE, relative_error  # noqa: E402
from xfresearch.analysis.prompts import prompt_of  # noqa: E402
from xfresearch.analysis.trace import noise_of  # noqa: E402
from xfresearch.analysis.tracing import effects, normal  # noqa: E402
from xfresearch.data.records import Record  # noqa: E402
from xfresearch.data.tokenizers import ByteTokenizer  # noqa: E402
from xfresearch.editing import rome  # noqa: E402
from xfresearch.editing.keys import covariance, keys_of  # noqa: E402
from xfresearch.editing.optimise import PUBLISHED, Settings, delta_for  # noqa: E402

pytestmark = pytest.mark.parity

LAYER, DEPTH, LENGTH = 1, 4, 64
MEMORY = f"blocks.{LAYER}.feed_forward"
REQUEST = Record("Ada Li", "Today {} plays", "chess", "go")
SECOND = Record("Bob", "{} was born in", "Rome", "Paris")
TRACED = [REQUEST, SECOND, Record("the C", "so {}", "x")]  # of two padded lengths; the last one ends in its subject
PREFIXES = ["", "xy. ", "A longer one. "]
TOKENS = 20 * LENGTH  # of the corpus
STEPS = 5
SAMPLES = 2
SUBLAYERS = {"stream": "", "attention": "attn", "feed_forward": "mlp"}


class Case:
    def __init__(self, number: int, folder):
        config = DRAWS["gpt2"](Draw(number))
        config.vocab_size, config.n_layer, config.n_positions = 257, DEPTH, LENGTH
        hf_torch.write_random(config, folder / "model", seed=number, dtype="float64")
        self.number = number
        with hf_torch.precision("float64"):
            self.theirs = hf_torch.read(folder / "model", "float64").requires_grad_(False)
        lm = xf.load(folder / "model")
        (folder / "notes.txt").write_text("".join(f"line {n} of the text, and {n * n} more\n" for n in range(300)))
        data = replace(lm.run.data, corpus=(f"text_files:{folder}/notes.txt",), cache_dir=str(folder / "cache"))
        evaluation = replace(lm.run.evaluation, split="train")
        run = replace(lm.run, data=data, sequence_length=LENGTH, evaluation=evaluation)
        self.lm = xf.LanguageModel(lm.config, lm.params, ByteTokenizer(), run)

    def rows(self):
        """[N, L]: the tokens of the covariance."""
        tokens_NL = np.concatenate(list(self.lm.batches(split="train", limit=TOKENS // LENGTH)))
        assert tokens_NL.shape == (TOKENS // LENGTH, LENGTH)
        return tokens_NL


@pytest.fixture(scope="module", params=range(ROUNDS))
def case(request, tmp_path_factory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(autouse=True)
def float64(x64):
    """JAX and PyTorch in 64 bits."""
    with hf_torch.precision("float64"):
        yield


def ids(text: str) -> list[int]:
    """One token is one byte."""
    return list(text.encode())


def last_of_subject(record: Record, prefix: str = "") -> int:
    return len(ids(prefix + record.prompt.split("{}")[0] + record.subject)) - 1


def logits(model, tokens):
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


@contextmanager
def changed(module, change):
    """Replaces the output of a module, or its first output, by `change` of it."""

    def hook(_, given, out):
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def seen(model, module, tokens):
    """The input and the output of a module in a pass."""
    calls = []
    handle = module.register_forward_hook(lambda _, given, out: calls.append((given[0], out)))
    logits(model, tokens)
    handle.remove()
    given, out = calls[0]
    return given[0], (out[0] if isinstance(out, tuple) else out)[0]


def their_keys(model, record: Record):
    """[J, F]"""
    matrix = model.transformer.h[LAYER].mlp.c_proj
    texts = [prefix + record.text for prefix in PREFIXES]
    keys = [seen(model, matrix, ids(text))[0] for text in texts]
    return torch.stack([key[last_of_subject(record, prefix)] for key, prefix in zip(keys, PREFIXES, strict=True)])


def their_covariance(model, tokens_NL):
    """[F, F]"""
    total, count = 0.0, 0
    for tokens_L in tokens_NL.tolist():
        for k in seen(model, model.transformer.h[LAYER].mlp.c_proj, tokens_L)[0]:
            total, count = total + torch.outer(k, k), count + 1
    return total / count


class Optimised(NamedTuple):
    delta: torch.Tensor
    losses: list[float]
    small: list[float]  # the terms that end the optimisation when they are small
    norms: list[float]  # of delta before it is clipped


def their_delta(model, record: Record, settings: Settings) -> Optimised:
    mlp = model.transformer.h[LAYER].mlp
    target = ids(f" {record.target_new}")
    essence = f"{record.subject} is a"
    v = seen(model, mlp, ids(record.text))[1][last_of_subject(record)]
    before = logits(model, ids(essence))[-1].log_softmax(-1)
    delta = torch.zeros_like(v).requires_grad_()
    optimizer = torch.optim.Adam([delta], lr=settings.rate, betas=(0.9, 0.999), eps=1e-8)
    losses, small, norms = [], [], []

    def with_delta(tokens, position):
        here = torch.arange(len(tokens))[:, None] == position
        with changed(mlp, lambda out: out + here * delta):
            return logits(model, tokens).log_softmax(-1)

    for step in range(settings.steps):
        nll = 0.0
        for prefix in PREFIXES:
            tokens = ids(prefix + record.text)
            log_p = with_delta(tokens + target, last_of_subject(record, prefix))[len(tokens) - 1 : -1]
            nll = nll - log_p.gather(-1, torch.tensor(target)[:, None]).mean() / len(PREFIXES)
        after = with_delta(ids(essence), len(ids(record.subject)) - 1)[-1]
        kl = settings.essence * torch.nn.functional.kl_div(before, after, log_target=True, reduction="sum")
        loss = nll + kl + settings.decay * delta.norm() / v.norm() ** 2
        losses.append(loss.item())
        small.append((nll + kl).item())
        if small[-1] < settings.enough or step == settings.steps - 1:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        norms.append(delta.norm().item())
        with torch.no_grad():
            if delta.norm() > settings.largest * v.norm():
                delta *= settings.largest * v.norm() / delta.norm()
    return Optimised(delta.detach(), losses, small, norms)


def test_keys(case, parity):
    result = keys_of(case.lm, MEMORY, REQUEST, PREFIXES)
    expected = their_keys(case.theirs, REQUEST)
    parity("transformers", "ROME, keys", "float64", relative_error(result[:, 0], expected))
    parity("transformers", "ROME, keys", "float64", relative_error(result.mean(0)[0], expected.mean(0)))


def test_covariance(case, parity):
    expected = their_covariance(case.theirs, case.rows())
    error = relative_error(covariance(case.lm, MEMORY, tokens=TOKENS)[0], expected)
    parity("transformers", "ROME, covariance", "float64", error)


@pytest.mark.parametrize("ends", ["steps", "enough", "clipped"])
def test_delta(case, ends, parity):
    settings = PUBLISHED._replace(steps=STEPS)
    free = their_delta(case.theirs, REQUEST, settings)
    if ends == "enough":
        settings = settings._replace(enough=(free.small[1] + free.small[2]) / 2)
    if ends == "clipped":
        settings = settings._replace(largest=0.1)
    expected = free if ends == "steps" else their_delta(case.theirs, REQUEST, settings)
    assert (len(expected.losses) < STEPS) == (ends == "enough"), free.small
    result = delta_for(case.lm, MEMORY, [REQUEST], PREFIXES, settings)
    assert len(result.losses) == len(expected.losses)
    parity("transformers", "ROME, losses", "float64", relative_error(result.losses, expected.losses))
    parity("transformers", "ROME, delta", "float64", relative_error(result.delta_D, expected.delta))


def edit(model, record: Record, C, ridge: float, key: str, settings: Settings) -> None:
    """Changes the weight of c_proj, [F, D] in transformers."""
    keys = their_keys(model, record)
    k = keys.mean(0)
    u = torch.linalg.solve(C + ridge * C.diagonal().mean() * torch.eye(len(C)), k)
    delta = their_delta(model, record, settings).delta
    model.transformer.h[LAYER].mlp.c_proj.weight += torch.outer(u, delta) / (u @ (k if key == "mean" else keys[0]))


@pytest.mark.parametrize("key, ridge", [("mean", 0.1), ("published", 0.1), ("mean", 1e-4)])
def test_edited_model(case, key, ridge, parity, monkeypatch):
    """Two requests, one after another, with the covariance of the model before both."""
    monkeypatch.setattr(import_module("xfresearch.editing.rome"), "prefixes_of", lambda lm, seed: PREFIXES)
    settings, requests = PUBLISHED._replace(steps=STEPS), [REQUEST, SECOND]
    ours, report = rome(case.lm, requests, MEMORY, tokens=TOKENS, key=key, ridge=ridge, settings=settings)
    theirs = deepcopy(case.theirs)
    C = their_covariance(theirs, case.rows())
    for record in requests:
        edit(theirs, record, C, ridge, key, settings)
    edited_FD = np.asarray(ours.params["blocks"]["main"]["feed_forward"]["down"]["kernel"][LAYER])
    before_FD, after_FD = (model.transformer.h[LAYER].mlp.c_proj.weight.numpy() for model in (case.theirs, theirs))
    text = "Then Ada Li plays go; Bob was born in Paris"
    before, after = (logits(model, ids(text)) for model in (case.theirs, theirs))
    assert relative_error(before, after) > 1e-3
    errors = {"change": relative_error(edited_FD - before_FD, after_FD - before_FD)}
    errors["logits"] = relative_error(ours(text)[0], after)
    for name in ("new", "old"):
        objects = [record.target_new if name == "new" else record.target for record in requests]
        expected = [their_score(theirs, record.text, text) for record, text in zip(requests, objects, strict=True)]
        errors[name] = relative_error(getattr(report.after, name), expected)
    if ridge == 0.1:
        for name, error in errors.items():
            parity("transformers", f"ROME, {key}, {name}", "float64", error)
    else:  # the solution is as exact as C, 1e-15, times the condition number of C with its ridge, here up to 2e6
        assert max(errors.values()) < 1e4 * TOLERANCE["float64"], errors


def their_score(model, text: str, target: str) -> float:
    """The probability of all tokens of the object."""
    tokens, following = ids(text), ids(f" {target}")
    log_p = logits(model, tokens + following).log_softmax(-1)[len(tokens) - 1 : -1]
    return log_p.gather(-1, torch.tensor(following)[:, None]).sum().exp().item()


def probability(model, tokens, answer, noise=None, clean=None, position=None, layers=(), sublayer="") -> float:
    """P(answer) after the tokens, with noise on the embeddings and, at one position of some layers, the clean outputs."""
    with ExitStack() as stack:
        if noise is not None:
            stack.enter_context(changed(model.transformer.wte, lambda out: out + noise))
        for layer in layers:
            block = model.transformer.h[layer]
            here = (torch.arange(len(tokens)) == position)[:, None]
            value = clean[layer]
            put = lambda out, here=here, value=value: torch.where(here, value, out)  # noqa: E731
            stack.enter_context(changed(block.get_submodule(sublayer), put))
        return logits(model, tokens)[-1].softmax(-1)[answer].item()


def test_trace(case, parity):
    model, window, noises = case.theirs, 2 + case.number % 2, {}
    prompts = [prompt_of(case.lm, record)._replace(target=ids(record.target)) for record in TRACED]
    draw = normal(case.number, 3 * noise_of(case.lm, prompts), SAMPLES)

    def recorded(number: int, length: int, width: int):
        noises[number] = draw(number, length, width)
        return noises[number]

    traced = effects(case.lm, prompts, window, recorded)
    for number, (record, ours) in enumerate(zip(TRACED, traced, strict=True)):
        tokens, answer = ids(record.text), ids(record.target)[0]
        first, last = last_of_subject(record) - len(ids(record.subject)) + 1, last_of_subject(record)
        noise_SLD = torch.from_numpy(noises[number])[:, : len(tokens)].clone()
        noise_SLD[:, :first] = noise_SLD[:, last + 1 :] = 0
        P_clean = probability(model, tokens, answer)
        P_corrupted = np.mean([probability(model, tokens, answer, noise) for noise in noise_SLD])
        assert abs(P_clean / P_corrupted - 1) > 1e-3
        parity("transformers", "trace, clean and corrupted", "float64", abs(ours.clean / P_clean - 1))
        parity("transformers", "trace, clean and corrupted", "float64", abs(ours.corrupted / P_corrupted - 1))
        for value, name in SUBLAYERS.items():
            clean = [seen(model, block.get_submodule(name), tokens)[1] for block in model.transformer.h]
            expected = np.full((DEPTH, len(tokens)), np.nan)
            for layer in range(DEPTH):
                # as in the published code: for an even window, one layer more below than above
                low, high = (layer, layer + 1) if value == "stream" else (layer - window // 2, layer - (-window // 2))
                layers = range(max(0, low), min(DEPTH, high))
                for position in range(first, len(tokens)):
                    place = (clean, position, layers, name)
                    expected[layer, position] = np.mean([probability(model, tokens, answer, n, *place) for n in noise_SLD])
            assert np.isnan(ours.restored[value][:, :first]).all()
            error = np.abs(ours.restored[value][:, first:] / expected[:, first:] - 1).max()
            parity("transformers", f"trace, {value}", "float64", error)
