"""The config of a run: all its options with those of the model, from files and overrides, resolved and checked."""
