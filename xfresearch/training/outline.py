"""The outline of a run: the lines for people that `train` prints first.

    model      840 k parameters, 1.9 M FLOPs per token; width 128: 4 x pre-norm [RMSNorm, 4 heads of 32, SwiGLU 344]
    data       notes: 12.3 MB, 12.3 M tokens to train on; validation 610 kB, 610 k tokens; tokenizer bytes
    budget     1.64 M tokens: 1.9 per parameter (usual for new parameters: 20), 0.13 epochs (up to 4 are nearly as good as
               new text)
    optimizer  AdamW, learning rate 0.001 (cosine, warm-up of 100 updates); 400 updates of 16 x 256 tokens
    devices    1 x cpu, float32
    execution  attention: blocked (skips masked keys and saves its weights; fast on CPU); layers: unroll (a scan copies each
               layer's parameters); loss of 1,024 tokens at a time (small enough for any device)
    output     runs/a: config.json, metrics.jsonl, checkpoints/ every 100 updates, report.html at the end
"""



from xfresearch.data import coverage
from xfresearch.data.labels import predicted
from xfresearch.data.tasks.task import ENDLESS
from xfresearch.models.words import model_line
from xfresearch.run_config.config import Config
from xfresearch.runtime import xla_flags
from xfresearch.runtime.hardware import kinds_of
from xfresearch.runtime.progress import amount
from xfresearch.runtime.tables import count, lines
from xfresearch.training import budget
from xfresearch.training.kernel_choices import layers_choice, loss_rows_choice, padded_vocabulary

LEFT_OUT = {  # what rows are packed from: counts of what they leave out, in words
    "n_pairs": {"n_longer": "longer pairs", "n_empty": "empty pairs"},
    "n_conversations": {"n_longer": "longer examples", "n_empty": "conversations without an answer"},
}
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}


def of_run(config: Config, workdir, train: list, held_out, mesh, kernels: dict) -> str:
    """The lines that a run prints before it trains. train, held_out: as in data_line."""
    tokens = budget.of(config, train)
    parts = {
        "model": model_line(config.model, config.sequence_length),
        "data": data_line(config, train, held_out),
        "budget": budget.line(config, tokens),
        "optimizer": optimizer_line(config),
        "devices": devices_line(config, mesh),
        "execution": execution_line(config, mesh, kernels),
        "output": output_line(config, workdir),
    }
    splits = [*zip(config.data.corpus, train, strict=True), *([(config.evaluation.split, held_out)] if held_out else [])]
    of_text = [line for name, split in splits for line in coverage.warning(name, split.meta)]
    return "\n".join([lines(parts), *(f"warning: {each}" for each in [*budget.warnings(config, tokens), *of_text])])


def data_line(config: Config, train: list, held_out) -> str:
    """Bytes, tokens and sequences of the prepared splits: one of each corpus to train on, and one for evaluation."""
    parts = [
        f"{name}: {_size(split.meta)} to train on" for name, split in zip(config.data.corpus, train, strict=True)
    ]
    if held_out is not None:
        parts.append(f"{config.evaluation.split} {_size(held_out.meta)}")
    if config.data.objective.kind != "next":
        parts.append(f"predicts {predicted(config.data)}")
    if train[0].meta.get("n_bytes"):
        kind = f"BPE of {config.data.bpe_vocab:,} ids" if config.data.tokenizer == "bpe" else config.data.tokenizer
        parts.append(f"tokenizer {kind}")
    return "; ".join(parts)


def _size(meta: dict) -> str:
    if meta["n_sequences"] == ENDLESS:
        return "sequences without end"
    about = "about " if meta.get("estimated") else ""
    text = f"{about}{amount(meta['n_bytes'], 'B')}, " if meta.get("n_bytes") else about
    words = LEFT_OUT["n_conversations" if "n_conversations" in meta else "n_pairs"]
    left = [f"{meta[name]:,} {what}" for name, what in words.items() if meta.get(name)]
    predicted = f"{count(meta['n_predicted'])} of answers" if "n_predicted" in meta else ""
    notes = [predicted, f"without {' and '.join(left)}" if left else "", coverage.words(coverage.shares(meta))]
    noted = f" ({'; '.join(filter(None, notes))})" if any(notes) else ""
    return f"{text}{count(meta['n_tokens'])} tokens in {meta['n_sequences']:,} sequences{noted}"


def optimizer_line(config: Config) -> str:
    """The update rule, the learning rate and the number of updates."""
    optimizer = config.optimizer
    warmup = f", warm-up of {optimizer.warmup} updates" if optimizer.warmup else ""
    name = OPTIMIZERS.get(optimizer.kind, optimizer.kind.capitalize())
    only = f", trains only {', '.join(optimizer.trainable)}" if optimizer.trainable else ""
    rate = f"learning rate {optimizer.learning_rate:g} ({optimizer.schedule}{warmup})"
    size = f"{config.steps:,} updates of {config.batch_size} x {config.sequence_length} tokens"
    return f"{name}, {rate}{only}; {size}"


def devices_line(config: Config, mesh) -> str:
    """The devices, the axes of the mesh, and the dtype."""
    axes = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
    return ", ".join([kinds_of(mesh.devices.flat), *axes, config.model.dtype])


def execution_line(config: Config, mesh, kernels: dict) -> str:
    """What the device decides, each with the reason: the kernel of each sublayer, layers, rows of the loss, vocabulary."""
    where: dict = {}
    for (block, sublayer), choice in kernels.items():
        where.setdefault((sublayer, choice), []).append(block)
    several = len(config.model.blocks) > 1 or config.model.encoder
    chosen = [
        f"{sublayer}{' of ' + ' and '.join(blocks) if several else ''}: {choice.name} ({choice.reason})"
        for (sublayer, choice), blocks in where.items()
    ]
    layers = layers_choice(config, mesh)
    rows = loss_rows_choice(config, mesh)
    chosen.append(f"layers: {layers.name} ({layers.reason})")
    chosen.append(f"loss of {rows.name:,} tokens at a time ({rows.reason})")
    ids, reason = padded_vocabulary(config, mesh)
    if ids * mesh.shape["tensor"] != config.model.vocab_size:
        chosen.append(f"vocabulary padded to {ids:,} ids ({reason})")
    if flags := xla_flags.described():
        chosen.append(f"flags {flags}")
    return "; ".join(chosen)


def output_line(config: Config, workdir) -> str:
    """The files of the run, and how often it saves."""
    events = ", tensorboard/" if config.log.tracker == "tensorboard" else ""
    saves = f"checkpoints/ every {config.checkpoint.every} updates"
    saves += f" and at least {config.checkpoint.seconds:g} s apart" if config.checkpoint.seconds else ""
    if config.checkpoint.emergency:
        saves += f", in {config.checkpoint.emergency} every {config.checkpoint.emergency_every}"
    return f"{workdir}: config.json, metrics.jsonl{events}, {saves}, report.html at the end"


