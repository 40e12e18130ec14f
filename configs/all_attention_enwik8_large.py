"""All-attention with adaptive span as published for enwik8 (Sukhbaatar et al. 2019), the large model.

all_attention_enwik8_large         36 layers of width 512, 2048 slots; 114 M parameters as published
all_attention_enwik8_large:3m      about 3 M parameters on WikiText-2
all_attention_enwik8_large:tiny    runs in less than a minute on two cores
"""

from xfresearch.configs import all_attention_enwik8_small


def get_config(size: str = "full"):
    config = all_attention_enwik8_small.get_config(size)
    model, attention = config.model, config.model.blocks.main.attention
    if size == "full":
        model.depth, attention.memory_slots, attention.dropout, config.steps = 36, 2048, 0.4, 200_000
    if size == "3m":
        model.depth, attention.memory_slots = 6, 512
    return config
