"""python torch_peer.py FOLDER torch|torch_compile

Times updates of a GPT-2 or a Llama in PyTorch (peers.py has the protocol). It imports nothing of xfresearch, so that any
Python with torch and safetensors can run it. FOLDER holds config.json and model.safetensors as `transformers` names them,
batch.npz, and peer.json:

    dtype: bfloat16 (autocast) or float32      rates: the learning rate of each update
    check_rows: rows of the batch whose losses are computed in float32, into losses.npy
    beta1, beta2, epsilon, weight_decay, clip: of AdamW; matrices of layers decay

The model is what a fast PyTorch training script has: one product for queries, keys and values, scaled_dot_product_attention,
fused AdamW, TF32 where float32 is left.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

ACTIVATIONS = {
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, size: int, bias: bool):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * size, bias=bias)
        self.out = nn.Linear(heads * size, width, bias=bias)

    def forward(self, x_BLD, rotation):
        B, L, _ = x_BLD.shape
        joined_BHLK = self.qkv(x_BLD).view(B, L, -1, self.size).transpose(1, 2)
        q_BHLK, k_BGLK, v_BGLK = joined_BHLK.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if rotation is not None:
            q_BHLK, k_BGLK = rotated(q_BHLK, *rotation), rotated(k_BGLK, *rotation)
        grouped = self.heads != self.kv_heads
        y_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BGLK, v_BGLK, is_causal=True, enable_gqa=grouped)
        return self.out(y_BHLK.transpose(1, 2).reshape(B, L, -1))


def rotated(x_BHLK, cos_LK, sin_LK):
    first, second = x_BHLK.chunk(2, -1)
    return torch.cat((first * cos_LK - second * sin_LK, second * cos_LK + first * sin_LK), -1).to(x_BHLK.dtype)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int, activation: str, gated: bool, bias: bool):
        super().__init__()
        self.activation, self.gated = ACTIVATIONS[activation], gated
        self.up = nn.Linear(width, hidden * (2 if gated else 1), bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x_BLD):
        if not self.gated:
            return self.down(self.activation(self.up(x_BLD)))
        gate_BLF, up_BLF = self.up(x_BLD).chunk(2, -1)
        return self.down(self.activation(gate_BLF) * up_BLF)


class Block(nn.Module):
    def __init__(self, norm, attention: Attention, feed_forward: FeedForward):
        super().__init__()
        self.norm_1, self.attention, self.norm_2, self.feed_forward = norm(), attention, norm(), feed_forward

    def forward(self, x_BLD, rotation):
        x_BLD = x_BLD + self.attention(self.norm_1(x_BLD), rotation)
        return x_BLD + self.feed_forward(self.norm_2(x_BLD))


class Model(nn.Module):
    """Its forward pass returns the mean loss, or with `each` the loss of every token."""

    def __init__(self, config: dict, length: int):
        super().__init__()
        llama = config["model_type"] == "llama"
        width = config["hidden_size" if llama else "n_embd"]
        heads = config["num_attention_heads" if llama else "n_head"]
        size = config.get("head_dim") or width // heads
        self.embed = nn.Embedding(config["vocab_size"], width)
        self.position = None if llama else nn.Embedding(config["n_positions"], width)
        self.head = nn.Linear(width, config["vocab_size"], bias=False)
        if config["tie_word_embeddings"]:
            self.head.weight = self.embed.weight
        if llama:
            norm = lambda: nn.RMSNorm(width, config["rms_norm_eps"])  # noqa: E731
            sizes = config.get("num_key_value_heads") or heads, size, False
            hidden, activation, depth = config["intermediate_size"], config["hidden_act"], config["num_hidden_layers"]
            angles_LK = torch.outer(torch.arange(length).float(), inverse_frequencies(config, size))
            self.register_buffer("cos_LK", angles_LK.cos(), persistent=False)
            self.register_buffer("sin_LK", angles_LK.sin(), persistent=False)
        else:
            norm = lambda: nn.LayerNorm(width, config["layer_norm_epsilon"])  # noqa: E731
            sizes = heads, size, True
            hidden, activation, depth = config["n_inner"] or 4 * width, config["activation_function"], config["n_layer"]
        self.norm = norm()
        self.blocks = nn.ModuleList(
            Block(norm, Attention(width, heads, *sizes), FeedForward(width, hidden, activation, llama, not llama))
            for _ in range(depth)
        )

    def forward(self, tokens_BL, targets_BL, each: bool = False):
        x_BLD = self.embed(tokens_BL)
        if self.position is not None:
            x_BLD = x_BLD + self.position.weight[: tokens_BL.shape[1]]
        rotation = (self.cos_LK, self.sin_LK) if self.position is None else None
        for block in self.blocks:
            x_BLD = block(x_BLD, rotation)
        logits_BLV = self.head(self.norm(x_BLD))
        return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="none" if each else "mean")


def inverse_frequencies(config: dict, size: int):
    return 1 / config.get("rope_theta", 10000.0) ** (torch.arange(0, size, 2).float() / size)


def load(model: Model, config: dict, stored: dict) -> None:
    """Copies the tensors of `transformers` into the model."""
    with torch.no_grad():
        for name, target in model.named_parameters():
            target.copy_(tensor(name, config, stored))


def tensor(name: str, config: dict, stored: dict):
    """A parameter of the model, made of the tensors that `transformers` has for it. GPT-2's matrices are [in, out] there."""
    *path, kind = name.split(".")
    if path[0] != "blocks":
        return stored[(LLAMA_TOP if config["model_type"] == "llama" else GPT2_TOP)[path[0]] + f".{kind}"]
    number, part = path[1], ".".join(path[2:])
    if config["model_type"] == "llama":
        return torch.cat([stored[f"model.layers.{number}.{each}.{kind}"] for each in LLAMA[part]])
    array = stored[f"transformer.h.{number}.{GPT2[part]}.{kind}"]
    return array.T if kind == "weight" and not part.startswith("norm") else array


GPT2_TOP = {"embed": "transformer.wte", "position": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"}
LLAMA_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
GPT2 = {"norm_1": "ln_1", "norm_2": "ln_2", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj"}
GPT2 |= {"feed_forward.up": "mlp.c_fc", "feed_forward.down": "mlp.c_proj"}
LLAMA = {
    "norm_1": ("input_layernorm",),
    "norm_2": ("post_attention_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "feed_forward.up": ("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward.down": ("mlp.down_proj",),
}


def make_optimizer(model: Model, settings: dict):
    named = dict(model.named_parameters())
    decayed = [p for name, p in named.items() if p.dim() > 1 and not name.startswith(("embed", "position", "head"))]
    ids = {id(p) for p in decayed}
    groups = [
        {"params": decayed, "weight_decay": settings["weight_decay"]},
        {"params": [p for p in named.values() if id(p) not in ids], "weight_decay": 0.0},
    ]
    betas = settings["beta1"], settings["beta2"]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=settings["epsilon"], fused=True)


class Update:
    """Each call runs one update, and returns its seconds and its loss."""

    def __init__(self, model: Model, settings: dict, batch: dict, compiled: bool):
        self.model, self.settings, self.count = model, settings, 0
        self.device = next(model.parameters()).device
        self.tokens, self.targets = (
            torch.as_tensor(batch[name]).long().to(self.device) for name in ("tokens", "targets")
        )
        self.optimizer = make_optimizer(model, settings)
        self.loss = torch.compile(model) if compiled else model

    def __call__(self) -> dict:
        rate = self.settings["rates"][min(self.count, len(self.settings["rates"]) - 1)]
        began = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings["dtype"] == "bfloat16"):
            loss = self.loss(self.tokens, self.targets)
        loss.backward()
        if self.settings["clip"]:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings["clip"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds, self.count = time.perf_counter() - began, self.count + 1
        return {"seconds": seconds, "loss": loss.item()}


def memory(device, before: int) -> dict:
    """The peak of allocated memory on a GPU; on a CPU, the growth of the process's peak."""
    if device.type == "cuda":
        return {"memory_bytes": torch.cuda.max_memory_allocated()}
    return {"memory_bytes": peak_bytes() - before}


def peak_bytes() -> int:
    """The process's largest resident memory so far. getrusage would give that of the process that started this one."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def say(figures: dict) -> None:
    print(json.dumps(figures), flush=True)


def main(folder: Path, name: str) -> None:
    config, settings = (json.loads((folder / file).read_text()) for file in ("config.json", "peer.json"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = dict(np.load(folder / "batch.npz"))
    before = peak_bytes()
    model = Model(config, batch["tokens"].shape[1])
    load(model, config, load_file(folder / "model.safetensors"))
    model.to(device)
    rows = settings["check_rows"]
    with torch.no_grad():
        few = (torch.as_tensor(batch[key][:rows]).long().to(device) for key in ("tokens", "targets"))
        losses_BL = model(*few, each=True).view(rows, -1)
    np.save(folder / "losses.npy", losses_BL.cpu().numpy())
    torch.set_float32_matmul_precision("high")
    update = Update(model, settings, batch, compiled=name == "torch_compile")
    first, second = update(), update()
    compile_seconds = first["seconds"] - second["seconds"] if name == "torch_compile" else None
    kind = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    say(
        {
            "losses": [first["loss"], second["loss"]],
            "compile_seconds": compile_seconds,
            "device": kind,
            "torch": torch.__version__,
        }
    )
    for _ in sys.stdin:
        say(update())
    say(memory(device, before))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
