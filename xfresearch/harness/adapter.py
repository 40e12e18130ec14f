"""The interface of lm_eval to a model: log-likelihoods and generated text. Each answer is computed once, then saved."""

import math
import sys
from collections.abc import Callable, Iterator

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows

from xfresearch.data import coverage
from xfresearch.data.cache import digest
from xfresearch.harness import generating, scoring
from xfresearch.harness.items import Items
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models.context import Execution
from xfresearch.models.reach import trained_reach
from xfresearch.models.sampling import NO_RULES
from xfresearch.models.sources import source_ids, target_ids
from xfresearch.runtime import distributed
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.terminal import bar as progress_bar
from xfresearch.runtime.terminal import unfiltered


class Adapter(TemplateLM):
    """`length` is the longest input of the model in tokens. A batch has about as many tokens as `batch_size` sequences
    of that length.

    Texts are tokenized as in lm_eval's own backend for Hugging Face models, which is a TemplateLM too.
    """

    def __init__(self, lm: LanguageModel, items: Items, length: int, batch_size: int, mesh=None, name="the model"):
        super().__init__()
        self.name = name
        assert lm.tokenizer, "measuring.measure refuses a model without one"
        self.lm = lm
        self.tokenizer = lm.tokenizer
        self.items = items
        self.length = length
        self.batch_size = batch_size
        self.mesh = mesh
        self.progress_stream = unfiltered(sys.stderr)  # while lm_eval runs, measuring.run_tasks redirects its own output
        reach = Execution(reach=trained_reach(lm.config, lm.params))
        self.scorer = scoring.make_scorer(lm.config, lm.run.training.loss_rows, mesh, reach)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.end_of_text

    @property
    def prefix_token_id(self) -> int:
        """As in lm_eval's backend: the token that the tokenizer names as a beginning, also if it adds it to no text."""
        return self._check_tokens([self.eot_token_id if self.tokenizer.bos is None else self.tokenizer.bos])[0]

    @property
    def begin_of_text(self) -> int | None:
        return self.tokenizer.begin_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """The tokens of `string`. Unless it is a continuation, it starts with the tokenizer's begin-of-text token, if
        there is one, because models with such a token were trained with it."""
        begin = None if add_special_tokens is False else self.begin_of_text
        tokens = self._check_tokens(self.tokenizer.encode(string.encode("utf-8", "replace")).tolist())
        return tokens if begin is None else [begin, *tokens]

    def loglikelihood(self, requests, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm)

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        def solve(pairs: list) -> Iterator:
            return self._score([scoring.continuation_windows(before, after, self.length) for before, after in pairs])

        # A context of only spaces is empty here: lm_eval has moved them to the continuation.
        pairs = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        return [tuple(answer) for answer in self._answers("loglikelihood", pairs, solve)]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = True) -> list[float]:
        def solve(texts: list) -> Iterator:
            for done in self._score([self._rolling_windows(*text) for text in texts]):
                yield [(index, total) for index, (total, _) in done]

        # Without the begin-of-text token: it is the prefix of the first window, and would be predicted from itself.
        each = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        self._warn_of_lost_text([request.args[0] for request in requests], each)
        texts = [(tokens, self.prefix_token_id) for tokens in each]
        return self._answers("rolling", texts, solve)

    def _warn_of_lost_text(self, texts: list[str], tokens: list[list[int]]) -> None:
        """Warns if lm_eval would divide by bytes that do not come back from the tokens."""
        meta = {"n_tokens": sum(map(len, tokens)), "n_bytes": 0, "n_unknown": 0, "n_lost": 0}
        for text, ids in zip((text.encode("utf-8", "replace") for text in texts), tokens, strict=True):
            own = {"n_bytes": len(text)} | coverage.counts(self.tokenizer, text, np.array(ids, np.int32))
            meta |= {name: meta[name] + number for name, number in own.items()}
        for line in coverage.warning(f"{self.name}, whole texts of tasks", meta) if distributed.first() else []:
            print(f"warning: {line}; lm_eval's figures per byte and per word count it", file=self.progress_stream)

    def generate_until(self, requests, disable_tqdm: bool = True) -> list[str]:
        prompts = [
            generating.make_request(self.tok_encode(context) or [self.prefix_token_id], settings, self.length)
            for context, settings in ((r.args[0], normalize_gen_kwargs(r.args[1])) for r in requests)
        ]
        return self._texts(prompts, self._generate, any(prompt.sampling for prompt in prompts))

    def _texts(self, questions: list, generate: Callable, sampled: bool) -> list[str]:
        """The text for each question. Sampled texts vary, so they are not saved."""
        if sampled:
            return [text for _, text in sorted(sum(generate(questions), []))]
        rules = generating.rules_of(self.lm)
        return self._answers("text" if rules == NO_RULES else f"text by {rules}", questions, generate)

    def _generate(self, requests: list) -> Iterator:
        return generating.generate(self.lm, requests, self.batch_size, self.mesh)

    def _score(self, windows: list) -> Iterator:
        for done in scoring.score(self.scorer, self.lm.params, windows, self.length, self.batch_size, self.mesh):
            if any(math.isnan(total) for _, (total, _) in done):  # with NaN, lm_eval would choose the first answer
                raise UserError(f"{self.name} computes log-likelihoods that are NaN: did its training diverge?")
            yield done

    def _check_tokens(self, tokens: list[int]) -> list[int]:
        """Returns `tokens`. Raises UserError for a token beyond the model's embedding table, such as a separator that
        was added to its tokenizer."""
        top = self.lm.config.vocab_size - 1
        if max(tokens, default=0) > top:
            highest = max(tokens)
            raise UserError(f"{self.name}: its tokenizer has token {highest}, but the model's vocabulary ends at {top}")
        return tokens

    def _rolling_windows(self, tokens: list[int], prefix: int) -> list[scoring.Window]:
        """Windows that predict every token of a text once. The first token follows the prefix token."""
        parts = get_rolling_token_windows(tokens, prefix, self.length, 1)
        return [scoring.Window([*inputs, predicted[-1]], len(predicted)) for inputs, predicted in parts]

    def _answers(self, kind: str, questions: list, solve: Callable) -> list:
        """The answer to each question: the saved one or that of `solve`, which yields lists of (index, answer)."""
        keys = [digest([kind, *question]) for question in questions]
        unanswered = {key: question for key, question in zip(keys, questions, strict=True) if key not in self.items}
        unanswered_keys = list(unanswered)
        total = len(set(keys))
        bar = progress_bar(
            desc=kind,
            total=total,
            initial=total - len(unanswered),
            unit="item",
            file=self.progress_stream,
            disable=None if distributed.first() else True,  # None: enabled if standard error is a terminal
            leave=False,
        )
        with bar:
            for done in solve(list(unanswered.values())):
                self.items.add({unanswered_keys[index]: answer for index, answer in done})
                bar.update(len(done))
        return [self.items[key] for key in keys]


class PairedAdapter(Adapter):
    """The interface to a model with an encoder: a context is the source, and a continuation begins the target.

    The decoder reads the start id and the target, whose end is not scored. Spaces in front of a continuation separate it
    from its context in one text, and are left out. A context that is too long loses its first tokens. Tasks that ask for the
    likelihood of a whole text without a context are refused: no source has it as its target.
    """

    def loglikelihood(self, requests, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        def solve(pairs: list) -> Iterator:
            return self._score([self._windows(*pair) for pair in pairs])

        pairs = [(self.source_of(context), self.target_of(text)) for context, text in (each.args for each in requests)]
        return [tuple(answer) for answer in self._answers("loglikelihood", pairs, solve)]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = True) -> list[float]:
        needs = "the encoder reads a context, and the task asks for the likelihood of whole texts without one"
        raise UserError(f"--tasks is not allowed with {self.name}: {needs}")

    def generate_until(self, requests, disable_tqdm: bool = True) -> list[str]:
        start = [self.tokenizer.decoder_start]
        asked = [(each.args[0], normalize_gen_kwargs(each.args[1])) for each in requests]
        questions = [
            (self.source_of(context), generating.make_request(start, settings, self.length)) for context, settings in asked
        ]
        return self._texts(questions, self._generated, any(request.sampling for _, request in questions))

    def _generated(self, questions: list) -> Iterator:
        sources, requests = zip(*questions, strict=True)
        return generating.generate(self.lm, requests, self.batch_size, self.mesh, sources)

    def source_of(self, context: str) -> list[int]:
        """The ids of a context as a source."""
        encoder = self.lm.config.encoder
        longest = (encoder.longest if encoder else 0) or self.lm.run.source_length
        return self._check_tokens(source_ids(self.lm.config, self.tokenizer, context))[-longest:]

    def target_of(self, text: str) -> list[int]:
        """The ids of a continuation, without the start."""
        return self._check_tokens(target_ids(self.lm.config, self.tokenizer, text.lstrip(" "))[1:])

    def _windows(self, source: list[int], target: list[int]) -> list[scoring.Window]:
        start = [self.tokenizer.decoder_start]
        windows = scoring.continuation_windows(start, target, self.length)
        return [each._replace(source=tuple(source)) for each in windows]
