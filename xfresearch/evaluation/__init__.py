"""Held-out loss: the data, the programs and the sums, for training and for every command that measures it."""
