"""All-attention with adaptive span as published for enwik8 (Sukhbaatar et al. 2019), the large model.

configs/all_attention_enwik8_large.py         36 layers of width 512, 2048 slots; 114 M parameters as published
configs/all_attention_enwik8_large.py:3m      about 3 M parameters on WikiText-2
configs/all_attention_enwik8_large.py:tiny    runs in less than a minute on two cores
"""

from configs import all_attention_enwik8_small


def get_config(size: str = "full"):
    config = all_attention_enwik8_small.get_config(size)
    model, attention = config.model, config.model.blocks.main.attention
    if size == "full":
        model.depth, attention.memory_slots, attention.dropout, config.steps = 36, 2048, 0.4, 200_000
    if size == "3m":
        model.depth, attention.memory_slots = 6, 512
    return config
