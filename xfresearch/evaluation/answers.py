"""Metrics of data sets with labels alone: their own figures, and the share of generated answers that they accept.

If an answer has one right form, teacher forcing tells whether a model gives it: each of its tokens must be the most likely
one after the tokens before. If many forms are right, such as orders or sentences, the model generates an answer, and the
data set decides (data/tasks/task.py).
"""

from collections.abc import Iterator, Sequence

import numpy as np

from xfresearch.data.pipeline import LabelledSplit, spread
from xfresearch.evaluation.whole_rows import Rows
from xfresearch.models.decoding import generate
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.sampling import Sampling
from xfresearch.run_config.closed_form import costs
from xfresearch.runtime.progress import stage
from xfresearch.sharding.placing import round_up

MOST = 256  # answers that are generated: generating is much slower than reading
TOGETHER = 64


def figures(model: ModelConfig, params: dict, data: Rows, measured: dict, mesh=None) -> dict[str, float]:
    """The data set's own figures and, where answers are generated, the share `accepted` of the first sample of each of MOST
    sequences. `measured` are the metrics of `data` that do not depend on the data set. {} for data without labels."""
    sequences = data.sequences
    if not isinstance(sequences, LabelledSplit):
        return {}
    task, indices = sequences.data_set, spread(len(sequences), len(data.rows))
    own = task.figures(measured, costs(model, data.length).parameters, sequences.examples(indices))
    if task.temperature is None or not model.causal:
        return own
    tokens_NL, _, segments_NL, *_ = sequences.examples(indices[:MOST])
    rows = zip(tokens_NL, segments_NL, strict=True)
    prompts = [task.prompt(tokens_L[segments_L == 1].tolist()) for tokens_L, segments_L in rows]
    answers = _generated(model, params, prompts, data.length, task, mesh)
    right = [answer is not None and task.accepts(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return own | {"accepted": float(np.mean(right))}


def _generated(model, params, prompts: Sequence[list[int]], length: int, task, mesh) -> Iterator[list[int] | None]:
    """The answer to each prompt, without its end; None if it has none within `length` tokens."""
    together, sampling = round_up(mesh, TOGETHER), Sampling(task.temperature, 0, 1.0)
    with stage("generating answers", len(prompts), "answers") as progress:
        for first in range(0, len(prompts), together):
            some = [prompts[min(first + row, len(prompts) - 1)] for row in range(together)]
            room = length - max(map(len, some))
            answers: list[list[int]] = [[] for _ in some]
            chunks = generate(model, params, some, room, sampling, first, (task.end,), task.vocab_size, mesh)
            for chunk in chunks:
                for answer, tokens in zip(answers, chunk, strict=True):
                    answer += tokens
            used = answers[: len(prompts) - first]
            yield from (answer if len(answer) < room else None for answer in used)
            progress.update(len(used))
