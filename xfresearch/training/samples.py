"""Text that a trained model generates for its report: a few prompts of the held-out text, several seeds each."""

from xfresearch.data.corpora import documents
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models.sampling import DEFAULT
from xfresearch.run_config.config import Config
from xfresearch.runtime.progress import stage

SEEDS = (0, 1, 2)
BEGINNING = 1 << 16  # bytes of a document in which prompts are looked for


def draw_samples(config: Config, tokenizer, params: dict) -> list[dict]:
    """[{prompt, seed, text}] for each prompt and each of SEEDS, sampled with the defaults (models/sampling.py)."""
    lm = LanguageModel(config.model, params, tokenizer, config)
    given = list(dict.fromkeys(text for text in (config.log.sample, *corpus_prompts(config, tokenizer)) if text))[:2]
    prompts = [tokenizer.decode(tokenizer.encode(text.encode())[: config.model.max_length // 2]) for text in given]
    asked = [(prompt, seed) for prompt in prompts for seed in SEEDS]
    with stage("sampling", unit="tokens") as progress:

        def count(number: int, text: str, tokens: list[int]) -> None:
            progress.update(len(tokens))

        texts = lm.generate([prompt for prompt, _ in asked], seed=[seed for _, seed in asked], stream=count)
    return [{"prompt": prompt, "seed": seed, "text": text} for (prompt, seed), text in zip(asked, texts, strict=True)]


def corpus_prompts(config: Config, tokenizer=None) -> list[str]:
    """Two prompts of at most 80 characters: the beginning of the held-out text, and a place further on."""
    texts = documents(config.data.corpus[0], config.evaluation.split, config.data, tokenizer)
    first = next(texts)[:BEGINNING]
    second = next(texts, b"")[:BEGINNING] or first[len(first) // 2 :].partition(b"\n")[2]
    return list(dict.fromkeys(map(_prompt, filter(bytes.strip, (first, second)))))


def _prompt(text: bytes) -> str:
    """The first line of a text that has more than spaces, so that a shell command with the prompt is one line."""
    return next(filter(str.strip, text.decode("utf8", "ignore").splitlines()), "")[:80]


def sampling_in_words() -> str:
    """The default temperature and top-p, for the report."""
    return f"temperature {DEFAULT.temperature:g}, top-p {DEFAULT.top_p:g}"
