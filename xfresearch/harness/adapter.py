"""A model as lm_eval sees one: log-likelihoods and texts on request, each asked of the model once and then kept."""

import math
import sys
from collections.abc import Callable, Iterator

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows
from tqdm import tqdm

from xfresearch import distributed
from xfresearch.data.cache import digest
from xfresearch.errors import UserError
from xfresearch.harness import generating, scoring
from xfresearch.harness.items import Items
from xfresearch.language_model import LanguageModel
from xfresearch.models.context import Execution
from xfresearch.models.reach import trained_reach


class Adapter(TemplateLM):
    """`length` is how many tokens the model reads at most; a batch reads about as many as `batch_size` sequences of it.

    Texts become tokens as in lm_eval's own backend for Hugging Face models, from which TemplateLM is taken.
    """

    def __init__(self, lm: LanguageModel, items: Items, length: int, batch_size: int, mesh=None, name="the model"):
        super().__init__()
        self.name = name
        self.lm, self.items, self.length, self.batch_size, self.mesh = lm, items, length, batch_size, mesh
        self.messages = sys.stderr  # lm_eval's own bars, of no use to anyone, are sent elsewhere while it runs
        reach = Execution(reach=trained_reach(lm.config, lm.params))
        self.scorer = scoring.make_scorer(lm.config, lm.run.training.loss_rows, mesh, reach)

    @property
    def eot_token_id(self) -> int:
        return self.lm.tokenizer.end_of_text

    @property
    def prefix_token_id(self) -> int:
        return self._known([self.eot_token_id if self.begin_of_text is None else self.begin_of_text])[0]

    @property
    def begin_of_text(self) -> int | None:
        return self.lm.tokenizer.begin_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """What begins a text stands before it, as models that were trained so expect, unless it is a continuation."""
        begins = self.begin_of_text is not None and add_special_tokens is not False
        tokens = self._known(self.lm.tokenizer.encode(string.encode("utf-8", "replace")).tolist())
        return [self.begin_of_text, *tokens] if begins else tokens

    def loglikelihood(self, requests, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm)

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        def solve(pairs: list) -> Iterator:
            return self._score([scoring.continuation_windows(*pair, self.length) for pair in pairs])

        # A context of nothing but spaces has given them to its continuation.
        pairs = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        return [tuple(answer) for answer in self._answers("loglikelihood", pairs, solve)]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = True) -> list[float]:
        def solve(texts: list) -> Iterator:
            for done in self._score([self._rolling_windows(tokens) for (tokens,) in texts]):
                yield [(number, total) for number, (total, _) in done]

        return self._answers("rolling", [(self.tok_encode(request.args[0]),) for request in requests], solve)

    def generate_until(self, requests, disable_tqdm: bool = True) -> list[str]:
        asked = [
            generating.request_of(self.tok_encode(context) or [self.prefix_token_id], settings, self.length)
            for context, settings in ((r.args[0], normalize_gen_kwargs(r.args[1])) for r in requests)
        ]
        if any(request.sampling for request in asked):  # each time another text: nothing to keep
            return [text for _, text in sorted(sum(self._generate(asked), []))]
        return self._answers("text", asked, self._generate)

    def _generate(self, requests: list) -> Iterator:
        return generating.generate(self.lm, requests, self.batch_size, self.mesh)

    def _score(self, windows: list) -> Iterator:
        for done in scoring.score(self.scorer, self.lm.params, windows, self.length, self.batch_size, self.mesh):
            if any(math.isnan(total) for _, (total, _) in done):  # of which lm_eval would choose the first answer
                raise UserError(f"{self.name} gives texts likelihoods that are not numbers: has its training diverged?")
            yield done

    def _known(self, tokens: list[int]) -> list[int]:
        """`tokens`; UserError for one that the model has no row for, such as a separator made up for its tokenizer."""
        top = self.lm.config.vocab_size - 1
        if max(tokens, default=0) > top:
            raise UserError(f"{self.name}: its tokenizer has token {max(tokens)}; the model's vocabulary ends at {top}")
        return tokens

    def _rolling_windows(self, tokens: list[int]) -> list[scoring.Window]:
        """Windows that predict every token of a text once, the first of them after the prefix token."""
        parts = get_rolling_token_windows(tokens, self.prefix_token_id, self.length, 1)
        return [scoring.Window([*read, predicted[-1]], len(predicted)) for read, predicted in parts]

    def _answers(self, kind: str, questions: list, solve: Callable) -> list:
        """The answer to each question, from the kept ones or from `solve`, which yields lists of (number, answer)."""
        keys = [digest([kind, *question]) for question in questions]
        open_ones = {key: question for key, question in zip(keys, questions, strict=True) if key not in self.items}
        names = list(open_ones)
        silent = None if distributed.first() else True  # None: shown where standard error is a terminal
        total, known = len(set(keys)), len(set(keys)) - len(names)
        bar = tqdm(desc=kind, total=total, initial=known, unit="item", file=self.messages, disable=silent, leave=False)
        with bar:
            for done in solve(list(open_ones.values())):
                self.items.add({names[number]: answer for number, answer in done})
                bar.update(len(done))
        return [self.items[key] for key in keys]
