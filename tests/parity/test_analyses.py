"""The lens, direct attribution and memories of GPT-2 and Llama equal the published formulas, written in PyTorch.

The formulas read a model of `transformers` through hooks, in float64:

    logit lens (nostalgebraist 2020)             head(final norm(stream after a layer))
    direct attribution (Elhage et al. 2021)      head(final norm(part)), with the norm's factor at the whole stream
    feed-forward memories (Geva et al. 2021)     triggers, agreement, composition and refinement of y = sum_i m_i v_i
"""

from typing import NamedTuple

import numpy as np
import pytest

from tests.parity.weights import MISSING

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

import xfresearch as xf  # noqa: E402
from tests.parity import hf_torch  # noqa: E402
from tests.parity.hf_draws import DRAWS, ROUNDS, Draw  # noqa: E402
from tests.tolerances import relative_error  # noqa: E402
from xfresearch import analysis  # noqa: E402

pytestmark = pytest.mark.parity

CASES = [(name, number) for name in ("gpt2", "llama") for number in range(ROUNDS)]
TOP = 5
# The layers, the norm before the feed-forward layer, both sublayers, and their last matrices.
NAMES = {
    "gpt2": ("transformer.h", "ln_2", "attn", "mlp", "c_proj", "c_proj"),
    "llama": ("model.layers", "post_attention_layernorm", "self_attn", "mlp", "o_proj", "down_proj"),
}


class Layer(NamedTuple):
    """What one layer computes: the stream before, between and after its sublayers, and what makes up their outputs."""

    middle: torch.Tensor  # [B, L, D]
    after: torch.Tensor
    heads: torch.Tensor  # [B, H, L, D]: what each head adds
    attention: torch.Tensor  # [B, L, D], with biases
    m: torch.Tensor  # [B, L, F]: coefficients
    v: torch.Tensor  # [F, D]: values
    y: torch.Tensor  # [B, L, D]: the feed-forward layer's output, with biases


class Pass(NamedTuple):
    embed: torch.Tensor
    layers: list[Layer]
    norm: torch.nn.Module
    head: torch.Tensor  # [V, D]
    logits: torch.Tensor


def run(folder, tokens) -> Pass:
    """A forward pass of the model in a folder, with the inputs and outputs of its modules."""
    model = hf_torch.read(folder, "float64")
    seen: dict = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, given, out, name=name: seen.update({name: (given, out)}))
    logits = model(tokens, use_cache=False).logits
    given = {name: values[0] for name, (values, _) in seen.items() if values}
    out = {name: value[0] if isinstance(value, tuple) else value for name, (_, value) in seen.items()}
    gpt2 = model.config.model_type == "gpt2"
    base = model.transformer if gpt2 else model.model
    at, second_norm, attention, feed_forward, output, down = NAMES[model.config.model_type]
    matrices = {name: module.weight if gpt2 else module.weight.T for name, module in model.named_modules() if leaf(module)}
    layers = []
    for number in range(model.config.num_hidden_layers):
        name = f"{at}.{number}"
        o, m = given[f"{name}.{attention}.{output}"], given[f"{name}.{feed_forward}.{down}"]
        H = model.config.num_attention_heads
        w_o = matrices[f"{name}.{attention}.{output}"].unflatten(0, (H, -1))
        heads = torch.einsum("blhv,hvd->bhld", o.unflatten(-1, (H, -1)), w_o)
        middle, y = given[f"{name}.{second_norm}"], out[f"{name}.{feed_forward}"]
        v = matrices[f"{name}.{feed_forward}.{down}"]
        layers.append(Layer(middle, middle + y, heads, out[f"{name}.{attention}"], m, v, y))
    embed = given[f"{at}.0.{'ln_1' if gpt2 else 'input_layernorm'}"]
    return Pass(embed, layers, base.ln_f if gpt2 else base.norm, model.lm_head.weight, logits)


def leaf(module) -> bool:
    """Whether a module is one matrix: Linear, or GPT-2's Conv1D, whose matrix is [inputs, outputs]."""
    return isinstance(module, torch.nn.Linear | transformers.pytorch_utils.Conv1D)


class Case:
    def __init__(self, name: str, number: int, folder):
        self.name = name
        self.config = DRAWS[name](Draw(number))
        hf_torch.write_random(self.config, folder, seed=number, dtype="float64")
        self.tokens = np.random.default_rng(number).integers(0, self.config.vocab_size, (3, 19))
        with torch.no_grad(), hf_torch.precision("float64"):
            self.theirs = run(folder, torch.from_numpy(self.tokens))
        self.lm = xf.load(folder)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request, tmp_path_factory) -> Case:
    return Case(*request.param, tmp_path_factory.mktemp(request.param[0]))


@pytest.fixture(autouse=True)
def float64(x64):
    """JAX in 64 bits, PyTorch without gradients and with norms in float64."""
    with torch.no_grad(), hf_torch.precision("float64"):
        yield


def read(forward_pass: Pass, x):
    """The logits of a vector, read as the last stream."""
    return forward_pass.norm(x) @ forward_pass.head.T


def test_logit_lens(case, parity):
    theirs, data = case.theirs, analysis.lens(case.lm, case.tokens).data
    final = theirs.logits.log_softmax(-1)
    following = torch.from_numpy(case.tokens)[:, 1:, None]
    for number, layer in enumerate(theirs.layers):
        log_p = read(theirs, layer.after).log_softmax(-1)
        expected = {
            "loss": -log_p[:, :-1].gather(-1, following).mean((1, 2)),
            "divergence": (final.exp() * (final - log_p)).sum(-1).mean(1),
        }
        for name, value in expected.items():
            difference = np.abs(data[f"{name}_rows"][:, number] - value.numpy()).max()  # a divergence may be 0
            parity("transformers", f"logit lens, {case.name}", "float64", difference / max(1.0, float(value.max())))
        agreement = (log_p.argmax(-1) == final.argmax(-1)).double().mean(1)
        np.testing.assert_allclose(data["agreement_rows"][:, number], agreement, rtol=1e-6)  # float32: a count
        np.testing.assert_array_equal(data["token"][number], log_p[0].argmax(-1))
        assert relative_error(data["probability"][number], log_p[0].max(-1)[0].exp()) < 1e-12


def frozen(norm, part, at):
    """A part of the last stream after the final norm, with the norm's factor at the whole stream, and without its bias."""
    if isinstance(norm, torch.nn.LayerNorm):
        deviation = (at.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        return (part - part.mean(-1, keepdim=True)) / deviation * norm.weight
    return part / (at.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight


def parts_of(theirs: Pass) -> dict:
    """{part: [B, L, D]} of the final hidden state."""
    raw = {"embed": theirs.embed}
    for number, layer in enumerate(theirs.layers):
        at = f"blocks.{number}.attention"
        raw |= {f"{at}.{h}": layer.heads[:, h] for h in range(layer.heads.shape[1])}
        raw[f"{at}.rest"] = layer.attention - layer.heads.sum(1)  # the bias
        raw[f"blocks.{number}.feed_forward"] = layer.y
    by_name = {name: frozen(theirs.norm, part, theirs.layers[-1].after) for name, part in raw.items()}
    bias = getattr(theirs.norm, "bias", None)
    return by_name if bias is None else by_name | {"final_norm": bias.expand_as(theirs.embed)}


def test_direct_attribution_by_sublayer_and_head_sums_to_the_logits(case, parity):
    theirs, data = case.theirs, analysis.lens(case.lm, case.tokens).data
    parts = parts_of(theirs)
    total = sum(part @ theirs.head.T for part in parts.values())
    assert relative_error(total, theirs.logits) < 1e-12
    label = f"direct attribution, {case.name}"
    ours, head, _ = analysis.contributions(case.lm.config, case.lm.params, case.tokens, by_head=True)
    parity("transformers", label, "float64", relative_error(head.logits(sum(ours.values())), theirs.logits))
    following = torch.from_numpy(case.tokens)[:, 1:, None]
    scale = float(theirs.logits.abs().max())
    assert set(data["parts"]) == set(parts) == set(ours)
    for column, name in enumerate(data["parts"]):
        logits = (parts[name] @ theirs.head.T)[:, :-1]
        expected = (logits.gather(-1, following)[..., 0] - logits.mean(-1)).mean(1)
        difference = np.abs(data["attribution_rows"][:, column] - expected.numpy()).max()  # of parts that may be 0
        parity("transformers", label, "float64", difference / scale)
        assert np.abs(ours[name] - parts[name].numpy()).max() < 1e-12 * float(theirs.embed.abs().max() + 10), name


def test_direct_attribution_by_key(case, parity):
    theirs, data = case.theirs, analysis.lens(case.lm, case.tokens).data
    towards = theirs.head[torch.from_numpy(case.tokens)[:, 1:]] - theirs.head.mean(0)
    for number, layer in enumerate(theirs.layers):
        for_key = layer.m[..., None] * layer.v  # [B, L, F, D]
        parts = frozen(theirs.norm, for_key, theirs.layers[-1].after[:, :, None])
        expected = torch.einsum("blfd,bld->blf", parts[:, :-1], towards).mean((0, 1))
        error = relative_error(data[f"blocks.{number}.feed_forward.keys"], expected)
        parity("transformers", f"direct attribution, {case.name}", "float64", error)


def test_feed_forward_memories(case, parity):
    theirs, data = case.theirs, analysis.memories(case.lm, case.tokens, top=TOP).data
    tokens = torch.from_numpy(case.tokens)
    length = tokens.shape[1]
    for number, layer in enumerate(theirs.layers):
        memory = f"blocks.{number}.feed_forward"
        m = layer.m.flatten(0, 1)  # [T, F]
        order = m.argsort(dim=0, descending=True, stable=True)[:TOP].T
        expected_m = m.gather(0, order.T).T
        above = expected_m > 0  # only such tokens are triggers
        np.testing.assert_array_equal(data[f"{memory}/triggers"], torch.where(above, order, -1))
        error = relative_error(data[f"{memory}/coefficients"], expected_m)
        parity("transformers", f"memories, {case.name}", "float64", error)
        value_token = read(theirs, layer.v).argmax(-1)
        np.testing.assert_array_equal(data[f"{memory}/value_tokens"][:, 0], value_token)

        r, y, o = (read(theirs, x).argmax(-1) for x in (layer.middle, layer.y, layer.after))
        active = layer.m > 0
        expected = {"active": active.double().mean(), "changes": (o != r).double().mean()}
        same = (value_token == y[..., None]) & active
        expected["composed"] = (~same.any(-1)).double().mean()
        expected["residual"] = ((o == r) & (o != y)).double().mean()
        expected["written"] = ((o == y) & (o != r)).double().mean()
        expected["both"] = ((o == r) & (o == y)).double().mean()
        expected["third"] = ((o != r) & (o != y)).double().mean()
        first = order[:, 0]
        inside = (first % length < length - 1) & above[:, 0]
        expected["agreement"] = (tokens.flatten()[first[inside] + 1] == value_token[inside]).double().mean()
        ends = tokens.flatten()[order]
        repeated = ((ends[:, :, None] == ends[:, None]) & above[:, None]).sum(-1) >= 3
        expected["shared"] = repeated[above].double().mean()
        for name, value in expected.items():
            assert data[name][number] == pytest.approx(float(value), abs=1e-6), name
