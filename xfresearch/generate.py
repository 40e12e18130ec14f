"""python -m xfresearch.generate --workdir DIR [--prompt TEXT ...]

Continues prompts with a trained model. Text is streamed to standard output, timings go to standard error.
"""

import sys
import time
from pathlib import Path

from xfresearch.evaluation.held_out import at_least
from xfresearch.models.sampling import DEFAULT
from xfresearch.runtime import command
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import write_json

EPILOG = """\
examples:
  python -m xfresearch.generate --workdir runs/quickstart --prompt "def main(" --temperature 0
  python -m xfresearch.generate --workdir runs/a --step 500 --prompt "class A" --prompt "import " --top-k 40 --seed 1

Without a prompt, the model starts a new text. The same seed gives the same text."""


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    prompts = [*options.prompt, *map(read_prompt, options.prompt_file)] or [""]

    from xfresearch.config.options import DataConfig
    from xfresearch.data.cache import enable_compilation_cache
    from xfresearch.loading import loading

    enable_compilation_cache(DataConfig())
    lm = loading.load(options.workdir, options.step)
    printer = Printer(prompts)
    sampling = {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")}
    if lm.step:
        print(f"{options.workdir}: step {lm.step:,}", file=sys.stderr)
    texts = lm.generate(list(inputs(lm, prompts, options)), **sampling, stream=printer)
    printer.finish()
    if options.json:
        samples = [
            {"prompt": prompt, "text": text, "tokens": count}
            for prompt, text, count in zip(prompts, texts, printer.counts, strict=True)
        ]
        result = {"workdir": options.workdir, "step": lm.step, **sampling, **printer.timing(), "samples": samples}
        write_json(options.json, result)


def parser() -> command.Parser:
    """The flags of the command."""
    made = command.Parser(prog="python -m xfresearch.generate", description=__doc__, epilog=EPILOG)
    models = "a run's directory, one of its checkpoints, a Hugging Face folder, or a .bin file of llama2.c"
    made.add_argument("--workdir", metavar="DIR", required=True, help=models)
    made.add_argument("--step", type=at_least(0), metavar="N", help="checkpoint to use (default: the newest good one)")
    made.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="text to continue; may be repeated"
    )
    made.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="file with the text of a prompt; may be repeated",
    )
    form = made.add_mutually_exclusive_group()
    words = "special tokens in a prompt, such as <|endoftext|>, are tokens (default: they are text)"
    form.add_argument("--special-tokens", action="store_true", help=words)
    words = "each prompt is a message of the user, put into the chat template of the model's Hugging Face folder"
    form.add_argument("--chat", action="store_true", help=words)
    made.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="longest text (default: 256, or fewer if the position table ends earlier)",
    )
    for flag, kind, metavar, meaning in (
        ("temperature", float, "T", "0 is greedy"),
        ("top-k", int, "K", "sample from the K likeliest tokens; 0: all"),
        ("top-p", float, "P", "sample from the fewest tokens with total probability P"),
    ):
        default = getattr(DEFAULT, flag.replace("-", "_"))
        words = f"{meaning} (default: {default})"
        made.add_argument(f"--{flag}", type=kind, default=default, metavar=metavar, help=words)
    made.add_argument("--seed", type=int, default=0, metavar="N", help="seed of sampling (default: 0)")
    made.add_argument("--json", metavar="FILE", help="also write prompts, texts and timings as JSON")
    return made


def parse(arguments: list[str]):
    return parser().parse_args(arguments)


def inputs(lm, prompts: list[str], options):
    """Each prompt as `lm.generate` reads it: a text, or token ids if special tokens or a chat template are asked for."""
    for prompt in prompts:
        if options.chat:
            yield lm.chat(prompt)
        else:
            yield lm.encode(prompt, special_tokens=True) if options.special_tokens else prompt


def read_prompt(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")  # not read_text, which would turn \r\n into \n
    except OSError as error:
        raise UserError(f"--prompt-file={path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt-file={path}: not UTF-8 at byte {error.start}") from error


class Printer:
    """Prints the texts in the order of the prompts: streams the first one, and prints the others when all are done."""

    def __init__(self, prompts: list[str]):
        self.prompts = prompts
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
            print(f"--- prompt {index + 1} of {len(self.prompts)} ---")
        print(self.prompts[index], end="", flush=True)


if __name__ == "__main__":
    command.run(main)
