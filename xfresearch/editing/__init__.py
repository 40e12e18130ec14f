"""Edits of the facts that a model has learnt."""
