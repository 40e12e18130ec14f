"""The tokens of a run for each parameter and each token of text, beside usual numbers: printed before the run begins."""

from typing import NamedTuple

from xfresearch.data.labels import trains_on_labels
from xfresearch.data.tasks.task import ENDLESS
from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.config import Config
from xfresearch.runtime.tables import count

TOKENS_PER_PARAMETER = 20  # of the best model for its training FLOPs (Hoffmann et al. 2022, table 3)
EPOCHS = 4  # over which repeated text is worth nearly as much as new text (Muennighoff et al. 2023)


class Budget(NamedTuple):
    tokens: int  # of all updates
    parameters: int  # active ones
    available: int  # tokens of the text to train on
    epochs: float  # of the corpus that is repeated most; 0 if none ends


def of(config: Config, corpora: list) -> Budget:
    """The budget of a run. corpora: the prepared training split of each corpus, with `meta`."""
    metas = [corpus.meta for corpus in corpora]
    weights = config.data.weights or (1,) * len(metas)
    sequences = config.steps * config.batch_size
    repeated = [
        0.0 if meta["n_sequences"] == ENDLESS else sequences * weight / sum(weights) / meta["n_sequences"]
        for weight, meta in zip(weights, metas, strict=True)
    ]
    parameters = costs(config.model, config.sequence_length).active_parameters
    return Budget(sequences * config.sequence_length, parameters, sum(meta["n_tokens"] for meta in metas), max(repeated))


def line(config: Config, budget: Budget) -> str:
    """'1.39 M tokens: 0.77 per parameter (usual for new parameters: 20), 0.37 epochs (up to 4 are ...)'."""
    epochs = f"{budget.epochs:.2g} epochs" if budget.epochs < 10 else f"{budget.epochs:,.0f} epochs"
    if not budget.epochs:
        return f"{count(budget.tokens)} tokens, all of them new"
    if not _is_pretraining(config):
        return f"{count(budget.tokens)} tokens, {epochs}"
    each = budget.tokens / budget.parameters
    usual = f"(usual for new parameters: {TOKENS_PER_PARAMETER})"
    repeats = f"(up to {EPOCHS} are nearly as good as new text)"
    return f"{count(budget.tokens)} tokens: {each:.2g} per parameter {usual}, {epochs} {repeats}"


def warnings(config: Config, budget: Budget) -> list[str]:
    """Warnings of too little text for the model, and of a warm-up that is longer than the run."""
    texts = []
    most = EPOCHS * budget.available / budget.parameters
    if _is_pretraining(config) and most < 1:
        texts.append(
            f"{count(budget.parameters)} parameters and {count(budget.available)} tokens of text do not fit: {EPOCHS} "
            f"epochs are {most:.2g} tokens per parameter, and usual are {TOKENS_PER_PARAMETER}; take more text or a "
            "smaller model"
        )
    warmup, steps = config.optimizer.warmup, config.steps
    if warmup > steps:
        texts.append(
            f"config.optimizer.warmup={warmup} is longer than the run of {steps:,} updates: the learning rate ends at "
            f"{steps / warmup:.0%} of its peak"
        )
    return texts


def _is_pretraining(config: Config) -> bool:
    """Whether a run trains new parameters on text: those of a trained model have had their tokens."""
    return not config.start.path and not trains_on_labels(config.data)
