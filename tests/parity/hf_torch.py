"""The `transformers` side of tests of Hugging Face folders: random models and their outputs."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

MASKED = ("bert", "roberta")  # values of model_type whose models predict masked tokens
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class InFloat64(TorchFunctionMode):
    """Computes in float64 everything that `transformers` computes in float32 regardless of the model's dtype: RMSNorm,
    RoPE angles, softmaxes, the router. It intercepts every call of a PyTorch function: the argument torch.float32
    becomes torch.float64, Tensor.float() becomes Tensor.double(), and the default dtype is float64."""

    def __enter__(self):
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_default_dtype(self.before)
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        kwargs = {name: wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(wider, args), **kwargs)


def wider(value):
    return torch.float64 if value is torch.float32 else value


def precision(dtype: str):
    return InFloat64() if dtype == "float64" else nullcontext()


def write_random(config, folder: Path, seed: int, dtype: str = "float32", change=lambda model: None, **saving) -> None:
    """Writes a model of `config` with random weights. Gains and biases are random too, and matrices preserve the scale
    of their inputs, so that logits are of order 1 and every part of the model affects them. `change` changes it further."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto_class(config).from_config(config)
        for name, parameter in model.named_parameters():
            parameter.data = random_like(name, parameter)
            if config.model_type == "gpt_oss" and name.endswith("gate_up_proj"):  # beyond the limits of its clamps
                parameter.data *= 4.0
            if config.model_type == "gpt_neo" and name.endswith(("q_proj.weight", "k_proj.weight")):
                # Its logits have no scale: without small weights, they would enlarge rounding errors.
                parameter.data /= (config.hidden_size / config.num_heads) ** 0.25
            if config.model_type == "t5" and name.endswith((".q.weight", ".k.weight")):  # nor have T5's
                parameter.data /= config.d_kv**0.25
        change(model)
    model.to(DTYPES[dtype]).save_pretrained(folder, **saving)


def auto_class(config):
    """The class that reads a model of `config`."""
    if config.model_type in MASKED:
        return AutoModelForMaskedLM
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def random_like(name: str, parameter):
    if parameter.ndim > 1:
        return 1.5 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    if name.endswith("bias"):
        return 0.3 * torch.randn_like(parameter)
    return parameter.data + torch.rand_like(parameter) - 0.5


def read(folder: Path, dtype: str):
    """The model in a folder, with the eager implementations of attention and experts. Call it, and the model, within
    `precision(dtype)`."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=DTYPES[dtype], **plain).eval()


def logits(folder: Path, tokens_BL, dtype: str) -> np.ndarray:
    with torch.no_grad(), precision(dtype):
        model = read(folder, dtype)
        cached = {} if model.config.model_type in MASKED else {"use_cache": False}
        logits_BLV = model(torch.from_numpy(tokens_BL), **cached).logits
    return on_host(logits_BLV)


def on_host(value: torch.Tensor) -> np.ndarray:
    """bfloat16 becomes float32: NumPy does not have it."""
    return (value.float() if value.dtype is torch.bfloat16 else value).numpy()


def logits_of_padded(folder: Path, tokens_BL, segments_BL, types_BL, dtype: str) -> np.ndarray:
    """Logits of rows of which the tokens with segment 0 are padding; those of padding are 0."""
    tokens_BL, segments_BL, types_BL = map(torch.from_numpy, (tokens_BL, segments_BL, types_BL))
    with torch.no_grad(), precision(dtype):
        out = read(folder, dtype)(tokens_BL, attention_mask=segments_BL, token_type_ids=types_BL)
    return on_host(out.logits * segments_BL[..., None])


def greedy(folder: Path, tokens_BL, count: int, dtype: str) -> np.ndarray:
    """`count` tokens of greedy decoding after each prompt."""
    prompts = torch.from_numpy(tokens_BL)
    settings = {
        "max_new_tokens": count,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(prompts),
    }
    with torch.no_grad(), precision(dtype):
        texts = read(folder, dtype).generate(prompts, **settings).numpy()
    return np.ascontiguousarray(texts[:, tokens_BL.shape[1] :])  # of a view, safetensors would write the whole memory


def router_logits(folder: Path, tokens_BL, dtype: str) -> list[np.ndarray]:
    """The router logits [B, L, E] of each mixture-of-experts layer."""
    with torch.no_grad(), precision(dtype):
        out = read(folder, dtype)(torch.from_numpy(tokens_BL), use_cache=False, output_router_logits=True)
    return [layer.numpy().reshape(*tokens_BL.shape, -1) for layer in out.router_logits]


def write_gradients(folder: Path, tokens_BL, dtype: str, out: Path) -> float:
    """Returns the mean cross-entropy of next-token prediction, and writes its gradients to the folder `out` in the
    place of the weights, so that they can be read like weights."""
    with precision(dtype):
        model = read(folder, dtype)
        logits_BLV = model(torch.from_numpy(tokens_BL[:, :-1]), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), torch.from_numpy(tokens_BL[:, 1:]).flatten())
        loss.backward()
        for parameter in model.parameters():
            parameter.data = parameter.grad
        model.save_pretrained(out)
        return loss.item()


def train(folder: Path, batches_NBL, rate: float, out: Path) -> list[float]:
    """Trains with one step of SGD per batch, in float64, on the mean cross-entropy plus the balance loss, weighted as
    in config.json. Writes the model to the folder `out` in float32. Returns the loss before each step."""
    losses = []
    with precision("float64"):
        model = read(folder, "float64")
        optimizer = torch.optim.SGD(model.parameters(), rate)
        for tokens_BL in map(torch.from_numpy, batches_NBL):
            output = model(tokens_BL[:, :-1], use_cache=False, output_router_logits=True)
            loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), tokens_BL[:, 1:].flatten())
            loss = loss + model.config.router_aux_loss_coef * output.aux_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    model.float().save_pretrained(out)
    return losses
