"""python -m xfresearch.prepare --config FILE[:arg] [--shard I/N] [--workers W] [--config.key=value ...]

Prepares the text of a config: tokenises it in shards, as `train` does while it trains. Several processes and machines may
share the work and its result; a preparation that was killed goes on at the next shard.
"""

import re

from xfresearch.runtime import command
from xfresearch.runtime.errors import UserError

EPILOG = """\
examples:
  python -m xfresearch.prepare --config llama --config.data.corpus=/data/fineweb --workers 16
  python -m xfresearch.prepare --config llama --config.data.corpus=/data/fineweb --shard 3/8
  python -m xfresearch.prepare --config llama --config.data.corpus=/data/fineweb --shard auto/8

The same command in several processes that share a folder (data.cache_dir, or data.shards, which may be a bucket) shares the
work: each shard is made by one of them. --shard I/N, with I from 0, makes every N-th shard and waits for nobody; 'auto' is
the number of the job of an array of Slurm or of an indexed job of Kubernetes (docs/data.md)."""


def parser() -> command.Parser:
    """The flags of the command."""
    made = command.Parser(prog="python -m xfresearch.prepare", description=__doc__, epilog=EPILOG)
    made.add_argument("--config", metavar="FILE[:arg]", required=True, help=command.CONFIG_HELP)
    made.add_argument("--shard", metavar="I/N", default="0/1", help="only every N-th shard, from the I-th on (default: all)")
    made.add_argument("--workers", metavar="W", type=int, help="processes; short for --config.data.workers")
    return made


def main(arguments: list[str]) -> None:
    options, overrides = parser().parse_known_args(arguments)
    first, step = numbers_of(options.shard)
    from xfresearch.run_config import known_keys

    given = ["--config", options.config, *overrides]
    given += [f"--config.data.workers={options.workers}"] if options.workers is not None else []
    known_keys.check(given)  # before the imports that take seconds

    from xfresearch.data.labels import trains_on_labels
    from xfresearch.data.prepared import Prepared
    from xfresearch.data.tokenizers import tokenizer_for
    from xfresearch.run_config.config_files import parse

    config = parse(given)
    if trains_on_labels(config.data) or config.data.objective.kind in ("seq2seq", "chat"):
        raise UserError(f"config.data.corpus={config.data.corpus} is not allowed: only text is prepared before training")
    tokenizer = tokenizer_for(config.data)
    for number, corpus in enumerate(config.data.corpus):
        prepared = Prepared(config.data, corpus, tokenizer, config.sequence_length)
        splits = {"train", config.evaluation.split} if not number and config.evaluation.every else {"train"}
        shards = [shard.number for shard in prepared.corpus.shards if any(map(shard.has, splits))]
        prepared.require(prepared.missing(shards[first::step]))
        there = len(shards) - len(prepared.missing(shards))
        print(f"{corpus}: {there:,} of {len(shards):,} shards are in {prepared.folder}")


def numbers_of(text: str) -> tuple[int, int]:
    """I and N of I/N. Raises UserError for another form."""
    from xfresearch.runtime.jobs import job_number

    form = re.fullmatch(r"(auto|\d+)/(\d+)", text)
    count = int(form[2]) if form else 0
    number = (job_number() if form[1] == "auto" else int(form[1])) if form else None
    if number is None or number >= count:
        raise UserError(f"--shard={text} is not allowed: it must be I/N with I from 0 to N-1, or auto/N in a numbered job")
    return number, count


if __name__ == "__main__":
    command.run(main)
