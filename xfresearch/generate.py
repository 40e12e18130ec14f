"""python -m xfresearch.generate --workdir DIR [--prompt TEXT ...] [--source TEXT ...]

Continues prompts with a trained model, decodes sources, or fills masks.

An encoder reads the sources, and a model that is not causal fills masks.
Text is streamed to standard output, timings go to standard error.
"""

import json
import sys
import time

from xfresearch.evaluation.held_out import at_least
from xfresearch.models.sampling import DEFAULT, Sampling, Settings
from xfresearch.runtime import command
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import read_bytes, write_json

EPILOG = """\
examples:
  python -m xfresearch.generate --workdir runs/quickstart --prompt "def main(" --temperature 0
  python -m xfresearch.generate --workdir runs/a --step 500 --prompt "class A" --prompt "import " --top-k 40 --seed 1
  python -m xfresearch.generate --workdir runs/sort --source "hello" --source "world" --beams 4 --length-penalty 0.6
  python -m xfresearch.generate --workdir models/bert --fill --prompt "The capital of France is [MASK]." --top-k 3

Without a prompt, the model starts a new text. The same seed gives the same text.
A prompt beside a source is the beginning of its target: one for all sources, or one for each."""

OF_FOLDER = "that of the model's Hugging Face folder, or else {}"
STOPPING = "a search ends once N texts have ended: true, false (if no other one is better), or never (if none can be)"
GUESSES = 5  # of a mask, by default
SETTINGS = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "beams", *Settings.__annotations__)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    prompts, sources = texts(options, "prompt") or [""], texts(options, "source")
    if sources:
        prompts = for_each(sources, prompts)

    from xfresearch.data.cache import enable_compilation_cache
    from xfresearch.loading import loading
    from xfresearch.options.run_options import DataConfig

    enable_compilation_cache(DataConfig())
    lm = loading.load(options.workdir, options.step)
    if options.fill:
        return fill(lm, prompts, options)
    printer = Printer(prompts, "source" if sources else "prompt")
    settings = {name: getattr(options, name) for name in SETTINGS}
    if lm.step:
        print(f"{options.workdir}: step {lm.step:,}", file=sys.stderr)
    read = source_inputs(lm, sources, options) if sources else None
    new = lm.generate(list(inputs(lm, prompts, options)), **settings, source=read, stream=printer)
    printer.finish()
    if options.json:
        samples = [
            {"prompt": prompt, "text": text, "tokens": count}
            for prompt, text, count in zip(prompts, new, printer.counts, strict=True)
        ]
        if sources:
            samples = [{"source": source, **sample} for source, sample in zip(sources, samples, strict=True)]
        settings |= used(lm, options)
        result = {"workdir": options.workdir, "step": lm.step, **settings, **printer.timing(), "samples": samples}
        write_json(options.json, result)


def used(lm, options) -> dict:
    """The settings that texts were generated with, those of the model's folder included."""
    from xfresearch.loading.generating import way

    given = {name: getattr(options, name) for name in Settings.__annotations__}
    how = vars(way(lm.source, Sampling(options.temperature, options.top_k, options.top_p), options.beams, given))
    return {name: value for name, value in how.items() if name != "rules"} | vars(how["rules"])


def parser() -> command.Parser:
    """The flags of the command."""
    made = command.Parser(prog="python -m xfresearch.generate", description=__doc__, epilog=EPILOG)
    models = "a run's directory, one of its checkpoints, a Hugging Face folder, or a .bin file of llama2.c"
    made.add_argument("--workdir", metavar="DIR", required=True, help=models)
    made.add_argument("--step", type=at_least(0), metavar="N", help="checkpoint to use (default: the newest good one)")
    for name, meaning in (("prompt", "text to continue"), ("source", "text that the encoder reads")):
        made.add_argument(f"--{name}", action="append", default=[], metavar="TEXT", help=f"{meaning}; may be repeated")
        words = f"file with the text of a {name}; may be repeated"
        made.add_argument(f"--{name}-file", action="append", default=[], metavar="FILE", help=words)
    form = made.add_mutually_exclusive_group()
    words = "special tokens in a prompt or a source, such as <|endoftext|>, are tokens (default: they are text)"
    form.add_argument("--special-tokens", action="store_true", help=words)
    words = "each prompt is a message of the user, put into the chat template of the model's Hugging Face folder"
    form.add_argument("--chat", action="store_true", help=words)
    words = f"the likeliest {GUESSES} tokens (--top-k) in the place of each [MASK] or <mask> of the prompts"
    form.add_argument("--fill", action="store_true", help=words)
    made.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="longest text (default: 256, or fewer if the position table ends earlier)",
    )
    for flag, kind, metavar, meaning, default in (
        ("temperature", float, "T", "0 is greedy", f"{DEFAULT.temperature}, or 0 with --beams"),
        ("top-k", int, "K", "sample from the K likeliest tokens; 0: all", DEFAULT.top_k),
        ("top-p", float, "P", "sample from the fewest tokens with total probability P", DEFAULT.top_p),
        ("beams", int, "N", "search for the likeliest text with N beams", 1),
        ("length-penalty", float, "A", "score of a beam: sum of log p / tokens^A", OF_FOLDER.format(1)),
        ("early-stopping", json_value, "WHEN", STOPPING, OF_FOLDER.format("false")),
        ("no-repeat-ngram-size", int, "N", "no N tokens follow each other twice; 0: they may", OF_FOLDER.format(0)),
        ("min-length", int, "N", "fewest tokens, those of the prompt included", OF_FOLDER.format(0)),
        ("repetition-penalty", float, "P", "divides scores of tokens that were there before", OF_FOLDER.format(1)),
        ("bad-words-ids", json_value, "IDS", "token ids that no text has: [[58100], [5, 8]]", OF_FOLDER.format("none")),
    ):
        value = default if flag in ("top-k", "top-p", "beams") else None
        words = f"{meaning} (default: {default})"
        made.add_argument(f"--{flag}", type=kind, default=value, metavar=metavar, help=words)
    made.add_argument("--seed", type=int, default=0, metavar="N", help="seed of sampling (default: 0)")
    made.add_argument("--json", metavar="FILE", help="also write prompts, texts and timings as JSON")
    return made


def json_value(text: str):
    """The value that a text is in JSON; other texts are themselves."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse(arguments: list[str]):
    made = parser()
    options = made.parse_args(arguments)
    given = [name for name in SETTINGS if getattr(options, name) != made.get_default(name) and name != "top_k"]
    if options.fill and given:
        raise UserError(f"--{given[0].replace('_', '-')} is not allowed with --fill: it is of text that the model continues")
    if options.temperature is None:
        options.temperature = DEFAULT.temperature if options.beams == 1 else 0.0
    for flag, why in (("chat", "a chat template is for prompts"), ("fill", "masks are in prompts")):
        if getattr(options, flag) and (options.source or options.source_file):
            raise UserError(f"--{flag} is not allowed with --source: {why} of a model of a single stack")
    return options


def fill(lm, prompts: list[str], options) -> None:
    """Prints the likeliest tokens of each mask of each prompt, and their probabilities."""
    filled = lm.fill(prompts, options.top_k or GUESSES)
    for prompt, masks in zip(prompts, filled, strict=True):
        print(prompt)
        for guesses in masks:
            print("   ", ", ".join(f"{text} {probability:.1%}" for text, probability in guesses))
    if options.json:
        samples = [{"prompt": prompt, "masks": masks} for prompt, masks in zip(prompts, filled, strict=True)]
        write_json(options.json, {"workdir": options.workdir, "step": lm.step, "samples": samples})


def texts(options, name: str) -> list[str]:
    """The texts of --NAME, and then those of the files of --NAME-file."""
    files = getattr(options, f"{name}_file")
    return [*getattr(options, name), *(read_text(f"--{name}-file", path) for path in files)]


def for_each(sources: list[str], prompts: list[str]) -> list[str]:
    """The prompt of each source. Raises UserError if there is neither one for all of them nor one for each."""
    if len(prompts) not in (1, len(sources)):
        allowed = f"one prompt, or one for each of {len(sources)} sources"
        raise UserError(f"{len(prompts)} prompts are not allowed: there must be {allowed}")
    return prompts if len(prompts) == len(sources) else prompts * len(sources)


def inputs(lm, prompts: list[str], options):
    """Each prompt as `lm.generate` reads it: a text, or token ids if special tokens or a chat template are asked for."""
    from xfresearch.models.sources import target_ids

    for prompt in prompts:
        if options.chat:
            yield lm.chat(prompt)
        elif not options.special_tokens:
            yield prompt
        elif lm.config.encoder:
            yield target_ids(lm.config, lm.tokenizer, prompt, special_tokens=True)
        else:
            yield lm.encode(prompt, special_tokens=True)


def source_inputs(lm, sources: list[str], options) -> list:
    """The sources as `lm.generate` reads them: texts, or token ids if special tokens are asked for."""
    from xfresearch.models.sources import source_ids

    if not options.special_tokens:
        return sources
    return [source_ids(lm.config, lm.tokenizer, source, special_tokens=True) for source in sources]


def read_text(flag: str, path: str) -> str:
    """The text of the file that `flag` names, as it is. Raises UserError if it cannot be read or is not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8")  # not read_text of Path, which would turn \r\n into \n
    except OSError as error:
        raise UserError(f"{flag}={path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{flag}={path}: not UTF-8 at byte {error.start}") from error


class Printer:
    """Prints the texts in the order of the prompts: streams the first one, and prints the others when all are done."""

    def __init__(self, prompts: list[str], label: str = "prompt"):
        self.prompts = prompts
        self.label = label  # what the texts are numbered by
        self.later_texts = [""] * len(prompts)
        self.counts = [0] * len(prompts)
        self.start = self.first = self.last = time.perf_counter()
        self.chunks = 0
        self.previous_index = len(prompts)
        self.first_count = 0

    def __call__(self, index: int, text: str, tokens: list[int]) -> None:
        self.last = time.perf_counter()
        if not self.chunks:  # not earlier: after a user's mistake, the error is the only line
            self._print_prompt(0)
        self.chunks += index <= self.previous_index  # each chunk calls in the order of the prompts
        self.previous_index = index
        if self.chunks == 1:
            self.first = self.last
            self.first_count += len(tokens)
        self.counts[index] += len(tokens)
        if index:
            self.later_texts[index] += text
        else:
            print(text, end="", flush=True)

    def finish(self) -> None:
        if not self.chunks:
            self._print_prompt(0)
        for index in range(1, len(self.prompts)):
            print("\n")
            self._print_prompt(index)
            print(self.later_texts[index], end="")
        print(flush=True)
        timing = self.timing()
        rate = f", then {timing['tokens_per_second']:.0f} tokens/s" if timing["tokens_per_second"] else ""
        print(f"{sum(self.counts)} tokens, the first after {timing['seconds_to_first']:.1f} s{rate}", file=sys.stderr)

    def timing(self) -> dict:
        """Timings in seconds and tokens per second. The rate excludes the first chunk, which waits for compilation; it
        is None if there was only one chunk."""
        later_tokens = sum(self.counts) - self.first_count
        seconds = self.last - self.first
        rate = later_tokens / seconds if later_tokens > 0 and seconds > 0 else None
        return {"seconds_to_first": self.first - self.start, "tokens_per_second": rate}

    def _print_prompt(self, index: int) -> None:
        if len(self.prompts) > 1:
            print(f"--- {self.label} {index + 1} of {len(self.prompts)} ---")
        print(self.prompts[index], end="", flush=True)


if __name__ == "__main__":
    command.run(main)
