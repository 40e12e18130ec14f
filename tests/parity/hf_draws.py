"""Random `transformers` configs, one function per family, with odd sizes and all options of the family.

A function makes its choices with a `Draw`. Draws 0 to ROUNDS - 1 are stratified: at every choice that all of them make,
together they pick each of up to ROUNDS options. Any other number is an independent draw.
"""

import numpy as np

ROUNDS = 4
LENGTH = 23  # tokens of a test's sequences: longer than windows, shorter than position tables
POSITIONS = 40  # rows of a position table


class Draw:
    def __init__(self, number: int):
        self.number = number
        self.choices = 0  # made so far
        self.rng = np.random.default_rng(number)

    def pick(self, *options):
        """One of `options`."""
        uniform = self.rng.random()
        self.choices += 1
        if self.number < ROUNDS:
            stratum = np.random.default_rng(self.choices).permutation(ROUNDS)[self.number]
            uniform = (stratum + uniform) / ROUNDS
        return options[int(uniform * len(options))]

    def size(self, low: int, high: int) -> int:
        """A random odd number."""
        return int(self.rng.integers(low // 2, (high + 1) // 2)) * 2 + 1


def heads(draw: Draw, grouped: bool = True) -> dict:
    """Heads, key-value heads and width. The head size is even, as RoPE requires, and not a power of two."""
    kv_heads = draw.pick(1, 2, 3)
    group = draw.pick(1, 2, 3)
    count = kv_heads * group
    size = draw.pick(6, 10, 14)
    options = {"num_attention_heads": count, "hidden_size": count * size}
    return options | ({"num_key_value_heads": kv_heads} if grouped else {})


def common(draw: Draw) -> dict:
    """Options of every family. There are no special tokens, so no token ends a text."""
    return {
        "vocab_size": draw.size(51, 99),
        "num_hidden_layers": draw.pick(1, 2, 3),
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": draw.pick(True, False),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


YARN = {"beta_fast": 5.0, "beta_slow": 0.5, "attention_factor": 0.8}


def rope(draw: Draw, **more) -> dict:
    """RoPE without scaling or with one of the scalings for longer contexts."""
    theta = float(draw.size(501, 9001))
    factor = draw.pick(1.7, 4.0, 8.0)
    scalings = {
        "default": {},
        "linear": {"factor": factor},
        "llama3": {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 16},
        "yarn": {"factor": factor, "original_max_position_embeddings": 16, **draw.pick({}, YARN)},
    }  # fmt: skip
    kind = draw.pick(*scalings)
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **scalings[kind], **more}}


def llama_like(draw: Draw) -> dict:
    """Options that families with Llama's names share."""
    hidden = draw.size(31, 75)
    epsilon = draw.pick(1e-6, 1e-5, 1e-3)
    return {**common(draw), **heads(draw), **rope(draw), "intermediate_size": hidden, "rms_norm_eps": epsilon}


def head_dim(draw: Draw) -> dict:
    """A head size that may differ from width / heads."""
    return {"head_dim": draw.pick(None, 4, 8)}


def llama(draw: Draw):
    from transformers import LlamaConfig

    biases = {"attention_bias": draw.pick(True, False), "mlp_bias": draw.pick(True, False)}
    return LlamaConfig(**llama_like(draw), **biases, **head_dim(draw), hidden_act=draw.pick("silu", "gelu", "relu"))


def mistral(draw: Draw):
    from transformers import MistralConfig

    return MistralConfig(**llama_like(draw), **head_dim(draw), sliding_window=draw.pick(None, 5, 11))


def mixtral(draw: Draw):
    from transformers import MixtralConfig

    sizes = {**llama_like(draw), **head_dim(draw), **experts(draw, "num_local_experts", 2, 3)}
    # Without a head size, MixtralConfig has head_dim=None, with which the yarn of `transformers` fails.
    sizes["head_dim"] = sizes["head_dim"] or sizes["hidden_size"] // sizes["num_attention_heads"]
    return MixtralConfig(**sizes, sliding_window=draw.pick(None, 5, 11))


def experts(draw: Draw, count: str, *chosen: int) -> dict:
    """A single expert only where its gate is not renormalised: it would be 1, which we refuse."""
    return {count: draw.pick(3, 4, 5), "num_experts_per_tok": draw.pick(*chosen)}


def qwen2(draw: Draw):
    from transformers import Qwen2Config

    return Qwen2Config(**upper_windows(draw, llama_like(draw)))


def qwen3(draw: Draw):
    from transformers import Qwen3Config

    more = {"head_dim": draw.pick(4, 8), "attention_bias": draw.pick(True, False)}
    return Qwen3Config(**upper_windows(draw, llama_like(draw)), **more)


def upper_windows(draw: Draw, sizes: dict) -> dict:
    """`sizes` with sliding windows in no layer, in the upper layers, or in arbitrary layers."""
    used = draw.pick(True, False, True)
    first = draw.pick(0, 1, 2)
    types = layer_types(draw, sizes["num_hidden_layers"]) if used else None
    window = {"sliding_window": draw.pick(4, 9), "use_sliding_window": used, "max_window_layers": first}
    return {**sizes, **window, "layer_types": types}


def layer_types(draw: Draw, layers: int) -> list[str] | None:
    """A random type for each layer, or None for the family's default."""
    any_order = [draw.pick("full_attention", "sliding_attention") for _ in range(layers)]
    return draw.pick(None, any_order)


def qwen3_moe(draw: Draw):
    """Experts in all layers, in each second one, or in all but one."""
    from transformers import Qwen3MoeConfig

    sizes = {**llama_like(draw), "head_dim": draw.pick(4, 8), "attention_bias": draw.pick(True, False)}
    renormalised = draw.pick(True, False)
    chosen = experts(draw, "num_experts", *((2, 3) if renormalised else (1, 2, 3)))
    where = draw.pick({}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]})
    if sizes["num_hidden_layers"] == 1:
        where = {}
    window = {"use_sliding_window": draw.pick(True, False), "sliding_window": draw.pick(4, 9)}
    hidden = {"moe_intermediate_size": draw.size(31, 75), "norm_topk_prob": renormalised}
    return Qwen3MoeConfig(**{**sizes, **chosen, **where, **window, **hidden})


def phi3(draw: Draw):
    from transformers import Phi3Config

    sizes = llama_like(draw)
    rotary = {"rope_type": "default", "partial_rotary_factor": rotary_fraction(draw, sizes)}
    sizes["rope_parameters"] = {"rope_theta": sizes["rope_parameters"]["rope_theta"], **rotary}
    return Phi3Config(**sizes, sliding_window=draw.pick(None, 5, 11))


def by_type(draw: Draw, sizes: dict) -> dict:
    """`sizes` with a RoPE for each type of layer, the scaling in the layers with full attention."""
    sliding = {"rope_type": "default", "rope_theta": float(draw.size(501, 9001))}
    return {**sizes, "rope_parameters": {"full_attention": sizes["rope_parameters"], "sliding_attention": sliding}}


def olmo3(draw: Draw):
    from transformers import Olmo3Config

    sizes = by_type(draw, llama_like(draw))
    types = layer_types(draw, sizes["num_hidden_layers"])
    more = {"sliding_window": draw.pick(4, 9), "attention_bias": draw.pick(True, False)}
    return Olmo3Config(**sizes, **more, layer_types=types)


def gemma3_text(draw: Draw):
    from transformers import Gemma3TextConfig

    sizes = by_type(draw, llama_like(draw))
    more = {"head_dim": draw.pick(4, 8), "attention_bias": draw.pick(True, False)}
    logits = {"query_pre_attn_scalar": draw.pick(3, 17), "sliding_window": draw.pick(4, 9)}
    logits |= {"final_logit_softcapping": draw.pick(None, 1.1, 3.0)}
    types = layer_types(draw, sizes["num_hidden_layers"])
    return Gemma3TextConfig(**sizes, **more, **logits, layer_types=types)


def olmo(draw: Draw):
    from transformers import OlmoConfig

    sizes = llama_like(draw)
    del sizes["rms_norm_eps"]
    return OlmoConfig(**sizes, **clipped(draw))


def olmo2(draw: Draw):
    from transformers import Olmo2Config

    return Olmo2Config(**llama_like(draw), attention_bias=draw.pick(True, False))


def olmoe(draw: Draw):
    from transformers import OlmoeConfig

    renormalised = draw.pick(True, False)
    chosen = (2, 3) if renormalised else (1, 2, 3)
    sizes = {**llama_like(draw), **clipped(draw), **experts(draw, "num_experts", *chosen)}
    return OlmoeConfig(**sizes, norm_topk_prob=renormalised)


def clipped(draw: Draw) -> dict:
    """The clipping of queries, keys and values, and their biases."""
    return {"clip_qkv": draw.pick(None, 0.8), "attention_bias": draw.pick(True, False)}


def gemma(draw: Draw):
    from transformers import GemmaConfig

    more = {"head_dim": draw.pick(4, 8), "attention_bias": draw.pick(True, False)}
    return GemmaConfig(**llama_like(draw), **more, hidden_act=draw.pick("gelu", "gelu_pytorch_tanh"))


def gemma2(draw: Draw):
    from transformers import Gemma2Config

    sizes = {**llama_like(draw), "head_dim": draw.pick(4, 8), "attention_bias": draw.pick(True, False)}
    logits = {
        "query_pre_attn_scalar": draw.pick(3, 17),
        "attn_logit_softcapping": draw.pick(None, 0.9, 2.0),
        "final_logit_softcapping": draw.pick(None, 1.1, 3.0),
    }
    types = layer_types(draw, sizes["num_hidden_layers"])
    return Gemma2Config(**sizes, **logits, sliding_window=draw.pick(4, 9), layer_types=types)


def gpt2(draw: Draw):
    from transformers import GPT2Config

    hidden = draw.pick(None, draw.size(31, 75))
    epsilon = draw.pick(1e-5, 1e-3)
    activation = draw.pick("gelu_new", "gelu", "relu", "silu")
    sizes = {**common(draw), **heads(draw, grouped=False)}
    return GPT2Config(**sizes, n_inner=hidden, layer_norm_epsilon=epsilon, activation_function=activation)


def gpt_neo(draw: Draw):
    from transformers import GPTNeoConfig

    sizes = {**common(draw), **heads(draw, grouped=False)}
    layers = sizes.pop("num_hidden_layers")
    sizes["num_heads"], sizes["num_layers"] = sizes.pop("num_attention_heads"), layers
    types = [[[draw.pick("global", "local"), "local"], 1]] if layers == 2 else [[[draw.pick("global", "local")], layers]]
    hidden = draw.pick(None, draw.size(31, 75))
    more = {"window_size": draw.pick(5, 11), "activation_function": draw.pick("gelu_new", "gelu", "relu")}
    return GPTNeoConfig(**sizes, **more, intermediate_size=hidden, attention_types=types)


def gpt_neox(draw: Draw):
    from transformers import GPTNeoXConfig

    choices = {"attention_bias": draw.pick(True, False), "use_parallel_residual": draw.pick(True, False)}
    sizes = {**common(draw), **heads(draw, grouped=False), "intermediate_size": draw.size(31, 75)}
    rotary = rope(draw, partial_rotary_factor=rotary_fraction(draw, sizes))
    return GPTNeoXConfig(**sizes, **choices, **rotary, hidden_act=draw.pick("gelu", "gelu_new", "relu"))


def rotary_fraction(draw: Draw, sizes: dict) -> float:
    """The fraction of a head that RoPE rotates: 2, 4 or all of its dimensions."""
    size = sizes["hidden_size"] // sizes["num_attention_heads"]
    return draw.pick(2, 4, size) / size


def opt(draw: Draw):
    from transformers import OPTConfig

    sizes = {**common(draw), **heads(draw, grouped=False), "ffn_dim": draw.size(31, 75)}
    switches = ("enable_bias", "layer_norm_elementwise_affine", "do_layer_norm_before", "_remove_final_layer_norm")
    choices = {name: draw.pick(True, False) for name in switches}
    return OPTConfig(**sizes, **choices, activation_function=draw.pick("relu", "gelu"))


def gptj(draw: Draw):
    from transformers import GPTJConfig

    sizes = {**common(draw), **heads(draw, grouped=False), "n_inner": draw.pick(None, draw.size(31, 75))}
    rotary_dim = round(rotary_fraction(draw, sizes) * sizes["hidden_size"] / sizes["num_attention_heads"])
    return GPTJConfig(**sizes, rotary_dim=rotary_dim, activation_function=draw.pick("gelu_new", "gelu"))


def phi(draw: Draw):
    from transformers import PhiConfig

    sizes = {**common(draw), **heads(draw), "intermediate_size": draw.size(31, 75)}
    rotary = rope(draw, partial_rotary_factor=rotary_fraction(draw, sizes))
    return PhiConfig(**sizes, **rotary, qk_layernorm=draw.pick(True, False), hidden_act=draw.pick("gelu_new", "relu"))


def gpt_oss(draw: Draw):
    from transformers import GptOssConfig

    sizes = {**llama_like(draw), **experts(draw, "num_local_experts", 2, 3), "head_dim": draw.pick(4, 8)}
    if sizes["rope_parameters"]["rope_type"] == "yarn":
        sizes["rope_parameters"]["truncate"] = draw.pick(True, False)
    more = {"sliding_window": draw.pick(4, 9), "attention_bias": draw.pick(True, False)}
    return GptOssConfig(**sizes, **more, layer_types=layer_types(draw, sizes["num_hidden_layers"]))


def bert(draw: Draw):
    from transformers import BertConfig

    return BertConfig(**bert_like(draw, draw.pick(1, 2, 3), POSITIONS))


def roberta(draw: Draw):
    """Two rows of the position table are before the first position."""
    from transformers import RobertaConfig

    return RobertaConfig(**bert_like(draw, draw.pick(1, 2), POSITIONS + 2) | {"pad_token_id": 1})


def bert_like(draw: Draw, types: int, rows: int) -> dict:
    """Options of models that predict masked tokens. Their output matrix is tied."""
    sizes = {**common(draw), **heads(draw, grouped=False), "intermediate_size": draw.size(31, 75)}
    more = {"hidden_act": draw.pick("gelu", "gelu_new", "relu", "silu"), "layer_norm_eps": draw.pick(1e-12, 1e-5, 1e-3)}
    return {**sizes, **more, "type_vocab_size": types, "max_position_embeddings": rows, "tie_word_embeddings": True}


MASKED = {"bert": bert, "roberta": roberta}  # models that predict masked tokens
DRAWS = {
    draw.__name__: draw
    for draw in (
        *(gpt2, gpt_neo, gptj, gpt_neox, opt, phi),
        *(llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, phi3, olmo, olmo2, olmo3, olmoe, gemma, gemma2, gemma3_text),
        gpt_oss,
    )
}
