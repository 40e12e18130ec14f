"""The interface of lm_eval to a model with an encoder: a context is the source, and a continuation begins the target.

The decoder reads the start id and the target, whose end is not scored. Spaces in front of a continuation separate it from
its context in one text, and are left out. A context that is too long loses its first tokens.
"""

from collections.abc import Iterator

from lm_eval.models.utils import normalize_gen_kwargs

from xfresearch.harness import generating, scoring
from xfresearch.harness.adapter import Adapter
from xfresearch.models.sources import source_ids, target_ids
from xfresearch.runtime.errors import UserError


class PairedAdapter(Adapter):
    """Tasks that ask for the likelihood of a whole text without a context are refused: no source has it as its target."""

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
