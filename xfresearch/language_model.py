"""LanguageModel: a model's parameters with its config, tokenizer and run, as `xf.load` returns them.

lm = xf.load("runs/a")
logits_BLV = lm(tokens_BL)
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace as with_fields
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from xfresearch.checkpoints import store
from xfresearch.config.reading import to_json
from xfresearch.config.run import Config
from xfresearch.errors import UserError, require
from xfresearch.files import new_directory
from xfresearch.interop import exporting
from xfresearch.interop.source import Source
from xfresearch.models import decoding, transformer
from xfresearch.models.context import Context
from xfresearch.models.memory import memory
from xfresearch.models.model_config import ModelConfig, longest_sequence, resolve_model
from xfresearch.models.sublayer import Memory
from xfresearch.models.taps import Taps
from xfresearch.sharding.partition import param_shardings

DTYPES = ("float32", "bfloat16", "float64")


def with_dtype(model: ModelConfig, dtype: str) -> ModelConfig:
    """`model` with the compute dtype `dtype`; unchanged if `dtype` is empty."""
    if not dtype:
        return model
    require(dtype in DTYPES, "model.dtype", dtype, f"one of {', '.join(DTYPES)}")
    return resolve_model(with_fields(model, dtype=dtype))


def abstract_params(model: ModelConfig, mesh=None) -> dict:
    """Shapes, dtypes and shardings of a model's parameters, on the first device or sharded over a `mesh`."""
    shapes = transformer.abstract(model)
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: device, shapes)
    else:
        shardings = param_shardings(mesh, shapes, transformer.axes(model))
    return jax.tree.map(lambda s, to: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=to), shapes, shardings)


class LanguageModel:
    """A language model: `.config` (ModelConfig), `.params` (nested dict of arrays, layers stacked), `.tokenizer` (None
    for a folder without one), `.run` (Config of the run that trained it), `.step`, and `.source` (the record of the
    Hugging Face folder that it came from, if any)."""

    def __init__(
        self, config: ModelConfig, params: dict, tokenizer, run: Config, step: int = 0, source: Source | None = None
    ):
        self.config = config
        self.params = params
        self.tokenizer = tokenizer
        self.run = run
        self.step = step
        self.source = source

    def __call__(self, tokens_BL, replace: dict[str, Callable] | None = None):
        """Logits [B, L, V] in float32 (float64 for a float64 model) of token ids [B, L].

        `replace` maps names of taps to functions from the tap's value to a new value of the same shape. Such a pass is
        not compiled: the functions see concrete arrays and may change from call to call.
        """
        tokens_BL = self._check_tokens(tokens_BL)
        if not replace:
            return _logits(self.config, self.params, tokens_BL)
        for name, function in replace.items():
            if not callable(function):
                raise UserError(f"replace[{name!r}] must be a function: to set a fixed value, pass lambda _: value")
        taps = Taps(replace=replace)
        logits_BLV = _forward(self.config, self.params, tokens_BL, taps)
        taps.check()
        return logits_BLV

    def capture(self, tokens_BL, names: Iterable[str]) -> dict:
        """{name: value} of the taps `names` in a pass over token ids [B, L]."""
        names = (names,) if isinstance(names, str) else tuple(names)
        return _capture(self.config, names, self.params, self._check_tokens(tokens_BL))

    def memory(self, layer: int, sublayer: str = "") -> Memory:
        """`.keys`, `.values` (and `.multipliers`) of a feed-forward layer, its experts, or attention's persistent slots
        (see models/memory.py for the shapes). The tap 'blocks.<layer>.<sublayer>.coefficients' has the coefficients."""
        return memory(self.config, self.params, layer, sublayer)

    def tap_names(self) -> list[str]:
        """Names of all values that `capture` records and `replace` replaces, in the order of computation."""
        taps = Taps()
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        jax.eval_shape(lambda params, tokens: _forward(self.config, params, tokens, taps), self.params, tokens)
        return taps.names

    def generate(
        self,
        prompt: str | list[str],
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stream: Callable[[int, str, list[int]], None] | None = None,
    ) -> str | list[str]:
        """Continues `prompt` and returns the new text, without the prompt; a list of prompts gives a list of texts.

        A text ends at an end-of-text token or after `max_new_tokens` tokens (default: 256, or fewer if the position
        table ends earlier). Temperature 0 is greedy. The same seed gives the same text, whatever the other prompts of
        the call are, but copies of a prompt in one call differ. An empty prompt starts a new text.
        `stream(index of the prompt, text, tokens)` is called while text is generated, always with whole characters.
        """
        if self.tokenizer is None:
            raise UserError("this model has no tokenizer, so it cannot read or write text: call it on token ids")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        texts = [""] * len(prompts)
        readers = [self.tokenizer.decode_stream(not p) for p in prompts]
        chunks = self._generate_tokens(prompts, max_new_tokens, decoding.Sampling(temperature, top_k, top_p), seed)
        for chunk in chunks:
            for index, tokens in enumerate(chunk):
                text = readers[index].push(tokens)
                texts[index] += text
                if stream and tokens:
                    stream(index, text, tokens)
        for index, reader in enumerate(readers):
            rest = reader.flush()
            texts[index] += rest
            if stream and rest:
                stream(index, rest, [])
        return texts[0] if isinstance(prompt, str) else texts

    def save(self, path) -> None:
        """Writes a directory that `load` reads: config.json, tokenizer/, checkpoints/<step>/ and the record of the
        Hugging Face folder that the model came from. The write is atomic. Raises UserError if `path` exists and is not
        an empty directory."""
        with new_directory(epath.Path(path).expanduser(), "save") as directory:
            (directory / "config.json").write_text(to_json(with_fields(self.run, model=self.config)) + "\n")
            if self.tokenizer is not None:
                self.tokenizer.save(str(directory / "tokenizer"))
            if self.source is not None:
                self.source.save(directory)
            store.save_params(directory, self.step, self.params)

    def export_hf(self, path, family: str = "", dtype: str = "", shard_bytes: int = 5 * 10**9) -> str:
        """Writes a Hugging Face folder that `transformers` and `load` read, in files of at most `shard_bytes`, and
        returns the family. See interop/exporting.py for the choice of family and dtype. Raises UserError if `path`
        exists and is not an empty directory, or if no family can express the model; the message gives the reason."""
        return exporting.export(self, epath.Path(path).expanduser(), family, dtype, shard_bytes).name

    def _generate_tokens(self, prompts, max_new_tokens: int | None, sampling, seed: int) -> Iterator[list[list[int]]]:
        if not 0 <= seed < 2**32:
            raise UserError(f"seed={seed} is not allowed: it must be at least 0 and below 2^32")
        if not prompts:
            return iter(())
        tokens = [self._encode(prompt) for prompt in prompts]
        count = self._new_tokens(max(map(len, tokens)), max_new_tokens)
        limits = {"stops": self.tokenizer.stops, "vocab_size": self.tokenizer.vocab_size}
        return decoding.generate(self.config, self.params, tokens, count, sampling, seed, **limits)

    def _encode(self, prompt: str) -> list[int]:
        """The tokens of `prompt` after the begin-of-text token. If the tokenizer has no such token, an empty prompt is
        the end-of-text token."""
        if not isinstance(prompt, str):
            raise UserError(f"prompt={prompt!r} is not allowed: it must be a string or a list of strings")
        begin = self.tokenizer.begin_of_text
        end = self.tokenizer.end_of_text
        try:
            ids = self.tokenizer.encode(prompt.encode()).tolist()
        except UnicodeEncodeError as error:
            raise UserError(f"prompt={prompt!r} is not allowed: it must be text that UTF-8 can encode") from error
        tokens = (ids or [end]) if begin is None else [begin, *ids]
        if max(tokens) >= self.config.vocab_size:  # the tokenizer may have ids beyond the model's embedding table
            top = self.config.vocab_size - 1
            raise UserError(f"prompt={prompt!r} has token {max(tokens)}, but the model's vocabulary ends at {top}")
        return tokens

    def _new_tokens(self, length: int, max_new_tokens: int | None) -> int:
        """The number of tokens to generate after a prompt of `length` tokens."""
        rows = longest_sequence(self.config)
        available = rows - length if rows else sys.maxsize
        if available < 1:
            raise UserError(
                f"a prompt of {length} tokens is not allowed: it must be shorter than the model's position table, "
                f"which has {rows} rows"
            )
        count = min(256, available) if max_new_tokens is None else max_new_tokens
        if not 1 <= count <= available:
            table = f"the model's position table has {rows} rows"
            most = f" and at most {available} after a prompt of {length} tokens ({table})" if rows else ""
            raise UserError(f"max_new_tokens={count} is not allowed: it must be at least 1{most}")
        return count

    def _check_tokens(self, tokens_BL) -> jax.Array:
        try:
            tokens = np.asarray(tokens_BL)
        except ValueError as error:
            raise UserError("tokens are not rows of equal length: they must be integers [B, L]") from error
        if tokens.ndim != 2 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
            hint = "; for a single sequence pass [tokens]" if tokens.ndim == 1 else ""
            given = f"shape {tokens.shape} and type {tokens.dtype}"
            raise UserError(f"tokens of {given} are not allowed: they must be integers [B, L]{hint}")
        length = tokens.shape[1]
        rows = longest_sequence(self.config)
        if rows and length > rows:
            allowed = f"at most {rows}, the rows of the model's position table"
            raise UserError(f"tokens of length {length} are not allowed: the length must be {allowed}")
        low, high = int(tokens.min()), int(tokens.max())
        top = self.config.vocab_size - 1
        if low < 0 or high > top:
            raise UserError(f"token {low if low < 0 else high} is not allowed: the model's token ids are 0 to {top}")
        return jnp.asarray(tokens, jnp.int32)


def _forward(config: ModelConfig, params: dict, tokens_BL, taps: Taps | None = None):
    lm = transformer.bind(config, params)
    positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    out = lm(tokens_BL, Context(positions_BL, taps=taps), layers=decoding.fast_layers())
    return lm.logits(out.hidden_BLD)


_logits = jax.jit(_forward, static_argnums=0)


@partial(jax.jit, static_argnums=(0, 1))
def _capture(config: ModelConfig, names: tuple[str, ...], params: dict, tokens_BL) -> dict:
    taps = Taps(record=names)
    _forward(config, params, tokens_BL, taps)
    taps.check()
    return taps.values
