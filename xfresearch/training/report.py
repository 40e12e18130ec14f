"""report.html: results, curves, config and machine of a run, in one static file that loads nothing from the network."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath
from markupsafe import Markup

from xfresearch.data import coverage
from xfresearch.data.labels import predicted, predicts_next
from xfresearch.models.block_config import BlockConfig
from xfresearch.models.words import block_in_words, model_in_words
from xfresearch.pages.charts import Curve, thinned
from xfresearch.pages.drawing import draw_block
from xfresearch.pages.figures import LineChart
from xfresearch.pages.html import write_page
from xfresearch.pages.panel import panel_pictures
from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.config import Config
from xfresearch.runtime.files import inside
from xfresearch.training.metrics import read_metrics
from xfresearch.training.samples import sampling_in_words

Chart = tuple[str, str, str, int, Mapping[str, float], bool]  # title, caption, key, scale of steps, levels, from zero
STYLES: dict[str, dict[str, Any]] = {
    "train": {"colour": "training"},
    "evaluation": {"colour": "model", "width": 1.8, "marked": True},
}

TERMS = {
    "parameters": "trained numbers of the model",
    "active_parameters": "parameters that one token uses: without the experts that it does not choose",
    "training_FLOPs": "floating-point operations of all updates: three times those of the forward pass",
    "loss": "mean cross-entropy in nats per token",
    "perplexity": "exp(loss): the number of equally likely tokens with the same loss",
    "bits_per_byte": "loss in bits, divided by the bytes of the text: it does not depend on the tokenizer",
    "bits_per_character": "loss in bits, divided by the characters of the text",
    "accuracy": "share of tokens (or labels) that are the most likely one for the model",
    "standard_error": "of the loss, in nats, over the units: the loss on other text of this kind differs by about this",
    "units": "the sequences or documents over which the standard error is computed",
    "tokens": "predicted tokens of the held-out text",
    "bytes": "bytes of the held-out text that come back from its tokens",
    "unknown_tokens": "share of the tokens of the held-out text that are the unknown token, which has no text",
    "lost_bytes": "share of the held-out text that does not come back: bits per byte are over the rest",
    "step": "updates of the parameters",
    "goodput": "share of the wall time that went into updates",
    "resumed_from": "the checkpoint with which each later start went on, in a run that makes emergency checkpoints",
    "starts": "how often the run was started: once, and after every interruption",
}


def write_report(
    workdir,
    *,
    config: Config,
    machine: dict,
    baselines: dict[str, float],
    result: dict,
    samples: list[dict],
    commands: dict[str, str],
    lineage: list[dict],
) -> epath.Path:
    """Writes `workdir`/report.html from the run's metrics.jsonl and the arguments, and returns its path.

    config: the resolved config, with the vocabulary. baselines: bits per byte by name. result: numbers of the last
    evaluation, with `bits_per_byte` if text comes back (if it does not predict next tokens: `accuracy` alone), and under
    `time` the share of each kind of time.
    samples: texts that the model generated (samples.py). commands: {label: shell command} to run next. lineage: the
    trained models that the run started from (workdir.py), the nearest first.
    """
    path = epath.Path(workdir) / "report.html"
    held_out = "text" if predicts_next(config.data) else predicted(config.data)
    headline = "bits_per_byte" if predicts_next(config.data) else "accuracy"
    counted = costs(config.model, config.sequence_length)
    active = counted.active_parameters
    tokens = config.batch_size * config.sequence_length  # per update
    sizes = {
        "parameters": counted.parameters,
        "training_FLOPs": counted.training_flops_per_token * result.get("step", 0) * tokens,
    }
    sizes |= {"active_parameters": active} if active != counted.parameters else {}
    facts = {name: value for name, value in (sizes | result).items() if name not in (headline, "time")}
    rows = read_metrics(inside(workdir, "metrics.jsonl"))
    write_page(
        path,
        Path(__file__).parent / "report.html.jinja",
        config=dataclasses.asdict(config),
        architecture=model_in_words(config.model),
        blocks=[(name, block_in_words(block), Markup(draw_block(block))) for name, block in _blocks(config)],
        held_out=held_out,
        machine=machine,
        bars=_bars(baselines, result),
        note=coverage.note(result),
        charts=charts(config, rows, baselines),
        panel=panel_pictures(rows),
        facts=facts,
        terms={name: text for name, text in TERMS.items() if name == headline or name in facts},
        headline=headline.replace("_", " "),
        figure=result.get(headline),
        time={kind: share for kind, share in result.get("time", {}).items() if share > 0},
        samples=samples,
        sampling=sampling_in_words(),
        commands=commands,
        lineage=lineage,
    )
    return path


def _bars(baselines: dict[str, float], result: dict) -> list[tuple[str, float, float, bool]]:
    """(name, bits per byte, percent of the longest bar, whether it is the model), from the worst to the best."""
    rows = [(name, bits, False) for name, bits in baselines.items()]
    if "bits_per_byte" in result:
        rows.append(("this model", result["bits_per_byte"], True))
    longest = max((bits for _, bits, _ in rows), default=1.0)
    return [(name, bits, 100 * bits / longest, ours) for name, bits, ours in sorted(rows, key=lambda row: -row[1])]


def _blocks(config: Config) -> list[tuple[str, BlockConfig]]:
    """The blocks by name, those of an encoder first."""
    encoder = config.model.encoder
    of_encoder = [(f"encoder: {name}", block) for name, block in encoder.blocks.items()] if encoder else []
    return [*of_encoder, *config.model.blocks.items()]


def charts(config: Config, rows: list[dict], baselines: Mapping[str, float] = {}) -> list[LineChart]:
    """Every chart for which the rows of metrics.jsonl have values."""
    held_out = "text" if predicts_next(config.data) else predicted(config.data)
    flops = costs(config.model, config.sequence_length).training_flops_per_token
    tokens = config.batch_size * config.sequence_length  # per update
    of_text = any("bits_per_byte" in row for row in rows)
    caption = "by step, with the compression baselines" if baselines else "by step"
    bits_per_byte = ("Bits per byte", caption, "bits_per_byte", 1, baselines, False)
    accuracy: Chart = ("Accuracy", f"of held-out {held_out}, by step", "accuracy", 1, {}, False)
    wanted: tuple[Chart, ...] = (
        bits_per_byte if of_text else accuracy,
        ("Loss", f"nats per {'label' if held_out == 'labels' else 'token'}, by tokens seen", "loss", tokens, {}, False),
        ("Learning rate", "by step", "learning_rate", 1, {}, True),
        ("Tokens per second", "of training, by step", "tokens_per_second", 1, {}, True),
        ("Busiest expert", "its load relative to an even share, one line per layer, by step", "busiest", 1, {}, True),
    )
    rows = [row | {"busiest": _busiest(row["router_load"])} if row.get("router_load") else row for row in rows]
    made = []
    for title, caption, key, scale, levels, from_zero in wanted:
        points = {kind: _points(rows, kind, key, scale) for kind in STYLES}
        curves = [Curve(points[kind], **style) for kind, style in STYLES.items() if len(points[kind])]
        if curves:
            bottom, top = _limits(curves, levels, from_zero)
            second = ("training FLOPs", flops) if key == "loss" else None
            along = "tokens" if key == "loss" else "step"
            made.append(LineChart(title, caption, along, curves, levels, bottom, top, second))
    return made


def _busiest(loads: dict[str, list[list[float]]]) -> list[float]:
    """For each layer, the load of its busiest expert divided by an even share."""
    return [max(map(float, filter(None, load)), default=0.0) * len(load) for layers in loads.values() for load in layers]


def _points(rows: list[dict], kind: str, key: str, scale: float) -> np.ndarray:
    """[points, 1 + lines]: x and the value of each line, for rows with finite values, averaged if they are many."""
    rows = [row for row in rows if row["kind"] == kind and row.get(key) is not None]
    return thinned([(row["step"] * scale, *np.atleast_1d(row[key])) for row in rows])


def _limits(curves: list[Curve], levels: Mapping[str, float], from_zero: bool) -> tuple[float | None, float | None]:
    """The ends of the y axis. Levels end it just above the highest of them: the first losses of an untrained model
    would otherwise flatten the rest of the chart."""
    if not levels:
        return 0 if from_zero else None, None
    lowest = min(min(curve.points[:, 1].min() for curve in curves), *levels.values())
    return lowest - 0.25, max(levels.values()) + 0.5
