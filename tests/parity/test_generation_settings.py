"""The generation settings of Hugging Face folders are obeyed as in `transformers`, token for token: in either file,
greedily and with beams, for one stack and for two, in batches."""

import json

import numpy as np
import pytest

from tests.parity.weights import MISSING

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

import xfresearch as xf  # noqa: E402
from tests.parity import hf_seq2seq, hf_torch  # noqa: E402
from tests.parity.hf_draws import DRAWS, Draw  # noqa: E402
from xfresearch.data.tokenizers import ByteTokenizer  # noqa: E402
from xfresearch.data.tokenizers.special_tokens import read  # noqa: E402
from xfresearch.models.sampling import Settings  # noqa: E402

pytestmark = pytest.mark.parity

PAIRS, CAUSAL = ("t5", "bart"), ("gpt2", "llama")
COUNT, END = 14, 9  # new tokens; the ids below END end a text
SETTINGS = {
    "n-grams": {"no_repeat_ngram_size": 3},
    "pairs": {"no_repeat_ngram_size": 2, "length_penalty": 2.0},
    "a least length": {"min_length": 11},
    "a penalty": {"repetition_penalty": 1.4},
    "words": {"bad_words_ids": [[9], [11], [20, 21], *([a, b] for a in range(30, 40) for b in range(12, 50)), [3]]},
    "a summariser": {"no_repeat_ngram_size": 3, "min_length": 10, "early_stopping": True, "length_penalty": 2.0},
    "never": {"early_stopping": "never", "length_penalty": 1.5, "repetition_penalty": 0.8},
    "all": {"no_repeat_ngram_size": 2, "min_length": 9, "repetition_penalty": 1.2, "bad_words_ids": [[12, 13], [44]]},
}
SEARCH = ("early_stopping", "length_penalty")  # only with beams


@pytest.fixture(scope="module", params=[*PAIRS, *CAUSAL])
def folder(request, tmp_path_factory):
    """A random model in float64: in float32 rounding may decide between two tokens."""
    name, path = request.param, tmp_path_factory.mktemp(request.param)
    if name in PAIRS:
        hf_seq2seq.write_random(hf_seq2seq.DRAWS[name](Draw(3)), path, 3, "float64")
    else:
        hf_torch.write_random(DRAWS[name](Draw(3)), path, seed=3, dtype="float64")
    return path


def write(folder, place: str, settings: dict) -> None:
    """The settings in generation_config.json, or in config.json as before 2023, with the ids of special tokens."""
    config, file = json.loads((folder / "config.json").read_text()), folder / "generation_config.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    ids = {key: value for key, value in (config | known).items() if key.endswith("_token_id")}
    ids |= {"eos_token_id": [*range(1, END)], "pad_token_id": 0}
    config = {key: value for key, value in config.items() if key not in Settings.__annotations__} | ids
    file.unlink(missing_ok=True)
    if place == "config.json":
        config |= settings
    else:
        file.write_text(json.dumps(ids | settings))
    (folder / "config.json").write_text(json.dumps(config))


class Tokens(ByteTokenizer):
    """Bytes, of which only the first are the model's, with the ends and the forced tokens of a folder."""

    def __init__(self, folder, vocab_size: int):
        super().__init__()
        special = read(folder)
        self.vocab_size, self.stops, self.forced = vocab_size, special.stops, special.forced
        self.decoder_start = special.decoder_start or 0


def ours(folder, prompts, sources, beams: int, **given) -> list[list[int]]:
    lm = xf.load(folder)
    lm.tokenizer = Tokens(folder, lm.config.vocab_size)
    texts: list = [[] for _ in prompts]
    keep = lambda row, text, new: texts[row].extend(new)  # noqa: E731
    asked = {"source": sources} if sources else {}
    lm.generate(prompts, beams=beams, temperature=0.0, max_new_tokens=COUNT, stream=keep, **asked, **given)
    return texts


def theirs(folder, prompts, sources, beams: int, **given) -> list[list[int]]:
    """Of prompts that are padded on the left, or of sources that are padded on the right."""
    if sources:
        inputs = hf_seq2seq.inputs(sources)
    else:
        longest = max(map(len, prompts))
        rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        inputs = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}
    skip = 1 if sources else inputs["input_ids"].shape[1]
    with torch.no_grad(), hf_torch.precision("float64"):
        model = hf_torch.read(folder, "float64")
        rows = model.generate(**inputs, max_new_tokens=COUNT, do_sample=False, num_beams=beams, **given).tolist()
    ends = {*range(1, END)}
    return [row[skip : next((i for i in range(skip, len(row)) if row[i] in ends), len(row))] for row in rows]


def asked_of(folder, number: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and sources of a model with two stacks: three of different lengths, without padding and ends in them."""
    lm = xf.load(folder)
    random = np.random.default_rng(number)
    rows = [random.integers(END, lm.config.vocab_size, length).tolist() for length in (9, 6, 4)]
    return ([[Tokens(folder, 1).decoder_start]] * 3, rows) if lm.config.encoder else (rows, [])


FILE, CONFIG = "generation_config.json", "config.json"


@pytest.mark.parametrize("place, name", [*((FILE, name) for name in SETTINGS), (CONFIG, "a summariser"), (CONFIG, "all")])
def test_the_settings_of_a_folder_are_obeyed_as_transformers_does(folder, name, place):
    """A least length of a batch of prompts counts their padding there, and not here: each prompt alone, then."""
    write(folder, place, SETTINGS[name])
    prompts, sources = asked_of(folder, len(name))
    alone = "min_length" in SETTINGS[name] and not sources
    for beams in (1, 4):
        found = ours(folder, prompts, sources, beams)
        batches = [(prompts[i : i + 1], sources[i : i + 1]) for i in range(3)] if alone else [(prompts, sources)]
        assert found == sum((theirs(folder, *batch, beams) for batch in batches), [])


@pytest.mark.parametrize("name", ["words", "never", "all"])
def test_arguments_count_before_the_settings_of_a_folder(folder, name):
    write(folder, "generation_config.json", {"no_repeat_ngram_size": 1, "repetition_penalty": 3.0, "min_length": 2})
    given = {"no_repeat_ngram_size": 0, "repetition_penalty": 1.0, "min_length": 0, **SETTINGS[name]}
    prompts, sources = (rows[:1] for rows in asked_of(folder, len(name)))
    for beams in (1, 3):
        arguments = {key: value for key, value in given.items() if beams > 1 or key not in SEARCH}
        assert ours(folder, prompts, sources, beams, **arguments) == theirs(folder, prompts, sources, beams, **arguments)


def test_the_settings_change_texts(folder):
    """So that a setting that nothing reads fails the tests above."""
    prompts, sources = asked_of(folder, 0)
    texts = {}
    for name, settings in {"none": {}, **SETTINGS}.items():
        write(folder, "generation_config.json", settings)
        texts[name] = ours(folder, prompts, sources, 4)
    assert sum(texts[name] != texts["none"] for name in SETTINGS) >= 6
