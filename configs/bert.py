"""BERT (Devlin et al. 2019): an encoder alone, which predicts masked tokens from the tokens on both sides.

bert          base: width 768, 12 layers, 12 heads, 30,522 tokens; 109.5 M parameters
bert:base     the same
bert:large    width 1024, 24 layers, 16 heads; 335.2 M parameters
bert:tiny     runs in less than a minute on two cores

Post-norm, GELU, learned positions, token types, biases everywhere, a norm of the embedding, and a layer before the output
matrix, the embedding's transpose. The published 110 M have a pooler for classes, and not the head for masked tokens.
The authors also train on whether a sentence follows another; here all tokens have type 0 in training.
"""

from xfresearch.configs import common

SIZES = {"base": (768, 12, 12), "large": (1024, 24, 16)}


def get_config(size: str = "base"):
    config = common.base(size, sizes=(*SIZES, "tiny"))
    model, block = config.model, config.model.blocks.main
    model.causal, config.data.objective.kind = False, "masked"
    model.position, model.token_types, model.embedding_norm, model.final_norm = "learned", 2, "layer", "none"
    model.head_activation, model.head_norm, model.head_bias, model.init = "gelu", "layer", True, "normal"
    block.layout, block.norm_bias, block.norm_epsilon = "post_norm", True, 1e-12
    block.feed_forward.kind, block.feed_forward.bias = "gelu", True
    block.attention.bias = ("query", "key", "value", "output")
    if size in SIZES:
        model.width, model.depth, block.attention.heads = SIZES[size]
        model.vocab_size, config.data.bpe_vocab = 30_522, 30_521  # and the mask token
        model.dropout = block.dropout = block.attention.dropout = 0.1
        config.batch_size, config.sequence_length, config.steps = 256, 512, 1_000_000
        optimizer = config.optimizer
        optimizer.learning_rate, optimizer.schedule, optimizer.final_fraction, optimizer.warmup = 1e-4, "linear", 0.0, 10_000
        optimizer.weight_decay, optimizer.beta2 = 0.01, 0.999
    return config
