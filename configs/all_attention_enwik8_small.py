"""All-attention with adaptive span as published for enwik8 (Sukhbaatar et al. 2019), the small model.

all_attention_enwik8_small         18 layers of width 512, 1024 slots; 39 M parameters as published
all_attention_enwik8_small:3m      about 3 M parameters on WikiText-2
all_attention_enwik8_small:tiny    runs in less than a minute on two cores

Each layer is one sublayer, norm(x + attention(x)). A token attends to the tokens before it, not to itself, and to
persistent slots. All heads and layers share one table of relative keys. The optimizer is theirs: Adagrad, the step
clipped separately for each tensor. Kernels have the standard deviation of PyTorch's linear layers, 1/sqrt(3 width), and
embeddings that of its embeddings, 1. docs/models.md lists the differences from the authors' code.
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size)
    model, block, attention = config.model, config.model.blocks.main, config.model.blocks.main.attention
    block.layout, block.norm_bias = "all_attention", True
    model.final_norm, model.tie_embeddings, model.head_bias = "none", False, True
    attention.position, attention.sees_itself = "relative_key", False
    attention.span, attention.memory_slots = "adaptive", 32
    if size == "full":
        model.width, model.depth, attention.heads, attention.memory_slots = 512, 18, 8, 1024
        attention.window, attention.span_loss, attention.dropout = 8192, 1e-7, 0.3
        config.data.corpus, config.data.tokenizer = ("enwik8",), "bytes"
        config.batch_size, config.sequence_length, config.steps = 4, 8192, 450_000
        config.optimizer.kind, config.optimizer.learning_rate = "adagrad", 0.07
        config.optimizer.schedule, config.optimizer.warmup = "constant", 32_000
        config.optimizer.clip, config.optimizer.clip_by = 0.03, "tensor"
        config.optimizer.weight_decay, config.optimizer.epsilon = 0.0, 1e-10
    if size == "3m":
        attention.memory_slots = 1024
    model.embedding_std, model.init, model.init_std = 1.0, "normal", (3 * model.width) ** -0.5
    return config
