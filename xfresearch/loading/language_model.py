"""LanguageModel: a model's parameters with its config, tokenizer and run, as `xf.load` returns them.

lm = xf.load("runs/a")
logits_BLV = lm(tokens_BL)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as with_fields
from functools import partial
from os import PathLike
from typing import Any, TypeAlias, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.typing import ArrayLike

from xfresearch.checkpoints import store
from xfresearch.data.given import remember
from xfresearch.data.labels import has_labels
from xfresearch.data.pipeline import stream_tokens
from xfresearch.data.tokenizers import Tokenizer
from xfresearch.interop.source import Source
from xfresearch.kernels.cross_entropy import token_nll
from xfresearch.loading import edits as edited
from xfresearch.loading.filling import Guesses, guesses, masked_ids, padded
from xfresearch.loading.generating import generated, way
from xfresearch.models import transformer
from xfresearch.models.inputs import (
    as_tokens,
    each_token,
    encode,
    forward,
    matching,
    patches,
    prefix_of,
    shared,
    tap_shapes,
    types_of,
)
from xfresearch.models.memories import memory
from xfresearch.models.model_config import ModelConfig, check_length, longest_sequence, predicts_next
from xfresearch.models.sampling import DEFAULT, Sampling, Settings
from xfresearch.models.sources import SourceText, prompts_of, source_of
from xfresearch.models.stack import end_formula, ends_with
from xfresearch.models.stream import Stream
from xfresearch.models.sublayer import Memory
from xfresearch.models.taps import Patch, Request, captured, request
from xfresearch.models.words import model_line
from xfresearch.options.reading import to_json
from xfresearch.pages.cards import Card
from xfresearch.pages.drawing import draw_block
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import new_directory, write_text
from xfresearch.runtime.hardware import kinds_of

Params: TypeAlias = dict[str, Any]  # nested dicts of arrays, with layers stacked
Text: TypeAlias = str | Sequence[str] | ArrayLike | Sequence[Sequence[int]]  # or token ids [B, L]
Replacement: TypeAlias = Callable[[jax.Array], ArrayLike] | ArrayLike | Patch
Replacements: TypeAlias = Mapping[str, Replacement]  # by the names of taps


class LanguageModel(Card):
    """A language model: `.config` (ModelConfig), `.params` (nested dict of arrays, layers stacked), `.tokenizer` (None
    for a folder without one), `.run` (Config of the run that trained it), `.step`, `.source` (the record of the Hugging
    Face folder that it came from, if any), and `.edits` (what editing did to it, with the arrays before)."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        tokenizer: Tokenizer | None,
        run: Config,
        step: int = 0,
        source: Source | None = None,
        edits: tuple[edited.Applied, ...] = (),
    ):
        self.config = config
        self.params = params
        self.tokenizer = tokenizer
        self.run = run
        self.step = step
        self.source = source
        self.edits = edits

    def _facts(self) -> dict[str, str]:
        """What the model is, and where its parameters come from."""
        trained = f"on {', '.join(self.run.data.corpus)}, {self.step:,} of {self.run.steps:,} updates"
        read = self.tokenizer
        parts = {
            "model": model_line(self.config, self.run.sequence_length),
            "tokenizer": f"{type(read).__name__} of {read.vocab_size:,} ids" if read else "none",
            "trained": trained if self.step else "not here",
            "source": f"a Hugging Face folder of {self.source.dtype} tensors" if self.source else "xfresearch",
            "params": _placed(self.params),
        }
        if self.edits:
            parts["edits"] = ", ".join(edit.record["method"] for edit in self.edits)
        return parts

    def _picture(self) -> tuple[str, str]:
        name, block = next(iter(self.config.blocks.items()))
        return f"the block {name}", draw_block(block)

    def with_params(self, params: Params, edits: tuple[edited.Applied, ...] | None = None) -> "LanguageModel":
        """The same model with other parameters, and with other `edits` if they are given."""
        edits = self.edits if edits is None else edits
        return LanguageModel(self.config, params, self.tokenizer, self.run, self.step, self.source, edits)

    def tokens(self, text: Text) -> jax.Array:
        """Token ids int32[B, L] of a text, or of several texts with equally many tokens, after the begin-of-text token if
        the tokenizer has one. All methods do the same with a text."""
        return as_tokens(self.config, self.tokenizer, text)

    def __call__(
        self,
        tokens_BL: Text,
        replace: Replacements | None = None,
        positions_BL: ArrayLike | None = None,
        segments_BL: ArrayLike | None = None,
        source: SourceText | None = None,
        token_types_BL: ArrayLike | None = None,
        prefix_BL: ArrayLike | None = None,
    ) -> jax.Array:
        """Logits [B, L, V] in float32 (float64 for a float64 model) of a text or of token ids [B, L].

        `replace` maps names of taps, which may have the wildcard `*`, to a pure function from the tap's value to a new
        value of the same shape, to the new value itself, or to an `xf.Patch`. The pass is compiled once for functions
        with the same operations: the arrays that they use may change, and so may the layer. Functions with
        custom derivatives, such as jax.nn.relu, are compiled anew. jax.jit, jax.grad and jax.vmap work around it.
        `positions_BL` are the positions of the tokens: 0, 1, ... by default, and within the position table, if the model
        has one. `segments_BL` are the numbers of their documents in a packed row, 0 for padding; by default one document
        without padding. `source` is what the encoder of a model with two stacks reads: a text, or ids [B, S], or lists of
        them of different lengths. `token_types_BL` are the types of the tokens of a model with a table of types, such as
        BERT's 0 and 1 for the two texts of a pair; by default all are 0. `prefix_BL` is not 0 for the tokens of a prefix,
        which see each other, in a causal model.
        """
        inputs = self._inputs(tokens_BL, replace, positions_BL, segments_BL, source, token_types_BL, prefix_BL)
        logits_BLV: jax.Array = _logits(self.config, self.params, *inputs)
        return logits_BLV

    def loss(
        self,
        tokens_BL: Text,
        replace: Replacements | None = None,
        positions_BL: ArrayLike | None = None,
        segments_BL: ArrayLike | None = None,
        source: SourceText | None = None,
        token_types_BL: ArrayLike | None = None,
        prefix_BL: ArrayLike | None = None,
    ) -> jax.Array:
        """The loss [B, L - 1] of each token of a text, or of token ids [B, L], given those before it, in nats. The other
        arguments are those of a call. Raises UserError for fewer than two tokens, and for a model that is not causal."""
        if reason := predicts_next(self.config):
            allowed = "fill has the likeliest tokens of masks, and evaluate --pseudo-perplexity the loss of masked tokens"
            raise UserError(f"loss does not apply to this model: {reason} (model.causal=False); {allowed}")
        inputs = self._inputs(tokens_BL, replace, positions_BL, segments_BL, source, token_types_BL, prefix_BL)
        if inputs[0].shape[1] < 2:
            raise UserError("a loss needs at least 2 tokens: the first one is only read")
        loss_BL: jax.Array = _loss(self.config, self.params, *inputs)
        return loss_BL

    def unembed(self, x: ArrayLike, normed: bool = False) -> jax.Array:
        """Logits [..., V] of a residual stream x [..., D], such as the tap 'blocks.3.feed_forward.residual', as if it
        were the last one: after the final norm and the output head. With `normed`, x is what the output matrix reads, as
        the tap 'final' is. Raises UserError for a model whose head does not read x alone."""
        if not normed and ends_with(self.config):
            raise UserError(f"unembed: the head reads {end_formula(self.config)}, and not x alone; use normed=True")
        lm = transformer.bind(self.config, self.params)
        read = jnp.asarray(x, self.config.dtype)
        if read.shape[-1:] != (self.config.width,):
            raise UserError(f"unembed: x of shape {read.shape} is not allowed: it must be [..., {self.config.width}]")
        return lm.logits(read if normed else lm.end(Stream(read)))

    def capture(
        self,
        tokens_BL: Text,
        names: str | Iterable[str],
        replace: Replacements | None = None,
        positions_BL: ArrayLike | None = None,
        segments_BL: ArrayLike | None = None,
        source: SourceText | None = None,
        token_types_BL: ArrayLike | None = None,
        prefix_BL: ArrayLike | None = None,
    ) -> dict[str, jax.Array]:
        """{name: value} of the taps `names`, in the order of computation, in a pass over a text or token ids [B, L]. `*`
        in a name stands for any part of it: 'blocks.*.feed_forward.out'. A name may be that of TransformerLens. The other
        arguments are those of a call; replaced values are recorded after the replacement."""
        names = matching(self.config, (names,) if isinstance(names, str) else tuple(names))
        inputs = self._inputs(tokens_BL, replace, positions_BL, segments_BL, source, token_types_BL, prefix_BL)
        values = _capture(self.config, frozenset(tap for tap, _ in names.values()), self.params, *inputs)
        return {name: values[tap] for name, (tap, _) in names.items()}

    def _inputs(
        self,
        tokens_BL: Text,
        replace: Replacements | None,
        positions_BL: ArrayLike | None,
        segments_BL: ArrayLike | None,
        source: SourceText | None,
        token_types_BL: ArrayLike | None,
        prefix_BL: ArrayLike | None,
    ) -> tuple[Any, ...]:
        """The arguments of the compiled passes after the parameters."""
        tokens_BL = self.tokens(tokens_BL)
        rows = self.config.max_length if self.config.position == "learned" else 2**31
        positions_BL = each_token("positions_BL", positions_BL, tokens_BL, limit=rows)
        segments_BL = each_token("segments_BL", segments_BL, tokens_BL)
        types_BL = types_of(self.config, token_types_BL, tokens_BL)
        read = source_of(self.config, self.tokenizer, source, len(tokens_BL))
        sizes = (*tokens_BL.shape, *(read.tokens_BS.shape[1:] if read else ()))
        taps = request(self.config, (), shared(self.config, patches(self.config, replace or {}, *sizes), *sizes))
        return tokens_BL, taps, positions_BL, segments_BL, read, types_BL, prefix_of(self.config, prefix_BL, tokens_BL)

    def batches(
        self, corpus: str = "", split: str = "", batch_size: int = 8, length: int = 0, limit: int = 0
    ) -> Iterator[np.ndarray]:
        """Token ids [B, L] of a corpus in order, in rows of `length` tokens; the last batch may have fewer rows. The
        defaults are the corpus, the held-out split and the length of training. `limit` is a number of rows (0: all).
        Tokens that do not fill a row are left out. Raises UserError if the data cannot be read, or for a number that is
        too small."""
        for name, value, low in (("batch_size", batch_size, 1), ("length", length, 0), ("limit", limit, 0)):
            if value < low:
                raise UserError(f"{name}={value} is not allowed: it must be at least {low}")
        length = length or self.run.sequence_length
        check_length(self.config, length)
        if self.tokenizer is None or has_labels(corpus or self.run.data.corpus[0]):
            raise UserError("batches: this needs a model with a tokenizer and a corpus of text")
        split = split or self.run.evaluation.split
        tokens = stream_tokens(self.run, split, corpus or None, self.tokenizer)[0]
        rows_NL = tokens[: len(tokens) // length * length].reshape(-1, length)[: limit or None]
        for first in range(0, len(rows_NL), batch_size):
            yield rows_NL[first : first + batch_size]

    def memory(self, layer: int | str, sublayer: str = "") -> Memory:
        """`.keys`, `.values` (and `.multipliers`) of a feed-forward layer, its experts, or attention's persistent slots
        (see models/memories.py for the shapes). The tap 'blocks.<layer>.<sublayer>.coefficients' has the coefficients.
        `layer` may also be the name of the memory, such as 'encoder.blocks.0.feed_forward'."""
        return memory(self.config, self.params, layer, sublayer)

    def tap_names(self) -> list[str]:
        """Names of all values that `capture` records and `replace` replaces, in the order of computation."""
        return list(tap_shapes(self.config))

    def generate(
        self,
        prompt: str | list[str] | list[int] | list[list[int]] = "",
        max_new_tokens: int | None = None,
        temperature: float = DEFAULT.temperature,
        top_k: int = DEFAULT.top_k,
        top_p: float = DEFAULT.top_p,
        seed: int | list[int] = 0,
        stream: Callable[[int, str, list[int]], None] | None = None,
        replace: Replacements | None = None,
        source: SourceText | None = None,
        beams: int = 1,
        **settings: Unpack[Settings],
    ) -> str | list[str]:
        """Continues `prompt` and returns the new text, without the prompt; a list of prompts gives a list of texts. A prompt
        is a text, in which special tokens are text, or token ids, such as those of `encode` and `chat`.

        A text ends at an end-of-text token or after `max_new_tokens` tokens (default: 256, or fewer if the position
        table ends earlier). Temperature 0 is greedy. The same seed gives the same text, whatever the other prompts of
        the call are, but copies of a prompt with one seed differ. `seed` may be a list, one for each prompt. An empty
        prompt starts a new text.
        `stream(index of the prompt, text, tokens)` is called while text is generated, always with whole characters.
        `replace` is that of a call. Its functions get the values [B, L, ...] of the prompts, padded on the left, and then
        those [B, 1, ...] of each new token. Each function is compiled anew.
        A model that was trained on prefixes (data.objective.kind) reads the prompt as one: its tokens see each other.
        `source` is what the encoder of a model with two stacks reads, a text or ids, or a list of them. The prompt is then
        the beginning of the target. `beams` above 1 search for the likeliest text, with temperature 0 (models/beams.py).
        `settings` are no_repeat_ngram_size, min_length, repetition_penalty, bad_words_ids and, of a search, length_penalty
        and early_stopping, as in `transformers` (models/sampling.py); by default, those of the model's folder.
        """
        tokenizer = self._reader()
        tokens, one, read = prompts_of(self.config, tokenizer, prompt, source)
        texts = [""] * len(tokens)
        readers = [tokenizer.decode_stream(self._begins(ids)) for ids in tokens]
        how = way(self.source, Sampling(temperature, top_k, top_p), beams, settings)
        prefix = self.run.data.objective.kind == "prefix" and not self.config.encoder
        asked = (tokens, read, max_new_tokens, how, seed, replace or {}, prefix)
        chunks = generated(self.config, self.params, tokenizer, *asked)
        for chunk in chunks:
            for index, new in enumerate(chunk):
                text = readers[index].push(new)
                texts[index] += text
                if stream and new:
                    stream(index, text, new)
        for index, reader in enumerate(readers):
            rest = reader.flush()
            texts[index] += rest
            if stream and rest:
                stream(index, rest, [])
        return texts[0] if one else texts

    def fill(self, text: str | list[str], top_k: int = 5) -> Guesses | list[Guesses]:
        """For each mask in a text, [MASK] or <mask>, the `top_k` likeliest tokens as (text, probability), in a model that
        predicts masked tokens, such as BERT. A list of texts gives a list of these. Raises UserError for a causal model, for
        a text without a mask, and for one that is longer than the model's positions."""
        tokenizer = self._reader()
        texts = [text] if isinstance(text, str) else text
        rows = [masked_ids(self.config, tokenizer, each) for each in texts]
        tokens_BL, segments_BL = padded(rows, longest_sequence(self.config))
        filled = guesses(tokenizer, tokens_BL, self(tokens_BL, segments_BL=segments_BL), top_k)
        return filled[0] if isinstance(text, str) else filled

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """The token ids of a text, as a call and `generate` read it: after the tokenizer's begin-of-text token, if it has
        one. With `special_tokens`, those in the text are tokens."""
        return encode(self.config, self.tokenizer, text, "text", special_tokens)

    def chat(self, messages: str | list[dict[str, Any]]) -> list[int]:
        """The token ids of a conversation, [{"role": "user", "content": "..."}] or one message of the user, by the chat
        template of the Hugging Face folder that the model came from, up to where the answer begins. Raises UserError if
        there is no template."""
        from xfresearch.data.chat import templates

        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        text = templates.render(self.source.files if self.source else {}, messages)
        ids = self.encode(text, special_tokens=True)
        # The template writes the begin-of-text token where it wants one.
        tokenizer = self._reader()
        begin = tokenizer.begin_of_text
        return ids if begin is None or tokenizer.encode_special(text)[:1] == [begin] else ids[1:]

    def _reader(self) -> Tokenizer:
        """The tokenizer. Raises UserError if there is none."""
        if self.tokenizer is None:
            raise UserError("this model has no tokenizer, so it cannot read or write text: call it on token ids")
        return self.tokenizer

    def _begins(self, ids: list[int]) -> bool:
        """Whether a prompt of these ids is empty, so that what follows is the beginning of a text."""
        tokenizer = self._reader()
        if self.config.encoder:
            return ids == [tokenizer.decoder_start]
        begin = tokenizer.begin_of_text
        return ids == [tokenizer.end_of_text if begin is None else begin]

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a directory that `load` reads: config.json, tokenizer/, checkpoints/<step>/ and the record of the
        Hugging Face folder that the model came from. The write is atomic. Raises UserError if `path` exists and is not
        an empty directory."""
        with new_directory(epath.Path(path).expanduser(), "save") as directory:
            run = with_fields(self.run, model=self.config)
            write_text(directory / "config.json", to_json(run) + "\n")
            remember(run)
            if self.tokenizer is not None:
                self.tokenizer.save(str(directory / "tokenizer"))
            if self.source is not None:
                self.source.save(directory)
            edited.save(directory, self.edits)
            store.save_params(directory, self.step, self.params)

    def export_hf(self, path: str | PathLike[str], family: str = "", dtype: str = "", shard_bytes: int = 5 * 10**9) -> str:
        """Writes a Hugging Face folder that `transformers` and `load` read, in files of at most `shard_bytes`, and
        returns the family. See interop/exporting.py for the choice of family and dtype. Raises UserError if `path`
        exists and is not an empty directory, or if no family can express the model; the message gives the reason."""
        from xfresearch.interop import exporting

        return exporting.export(self, epath.Path(path).expanduser(), family, dtype, shard_bytes).name


@partial(jax.jit, static_argnums=0)
def _logits(config: ModelConfig, params: Params, *inputs: Any) -> jax.Array:
    lm, out = forward(config, params, *inputs)
    logits_BLV: jax.Array = lm.logits(out.hidden_BLD)
    return logits_BLV


@partial(jax.jit, static_argnums=0)
def _loss(config: ModelConfig, params: Params, tokens_BL: jax.Array, *inputs: Any) -> jax.Array:
    lm, out = forward(config, params, tokens_BL, *inputs)
    loss_BL: jax.Array = token_nll(out.hidden_BLD[:, :-1], lm.logit_head(), tokens_BL[:, 1:])[0]
    return loss_BL


@partial(jax.jit, static_argnums=(0, 1))
def _capture(
    config: ModelConfig, names: frozenset[str], params: Params, tokens_BL: jax.Array, taps: Request, *inputs: Any
) -> dict[str, jax.Array]:
    taps = with_fields(taps, record=request(config, names).record)
    return captured(config, forward(config, params, tokens_BL, taps, *inputs)[1].captures, names)


def _placed(params: Params) -> str:
    """The dtype of parameters, and the devices that they are on."""
    leaves = jax.tree.leaves(params)
    devices = {device for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.devices()}
    dtypes = ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))
    return f"{dtypes} on {kinds_of(devices) or 'the host'}"
