"""A process that makes shards for crew.py. A process of its own is bounded in memory by being replaced now and then: some
libraries of tokenizers never free what they have learnt about words.

It reads a line of JSON with what to prepare, then one for each shard, and answers with lines: the bytes that are done, the
shard, or an error.
"""

import json
import os
import sys
import time
import traceback

from xfresearch.data import prepared
from xfresearch.data.corpus_inputs import Input, Shard
from xfresearch.data.tokenizers.loading import load_tokenizer
from xfresearch.options.reading import from_dict
from xfresearch.options.run_options import DataConfig
from xfresearch.runtime.errors import UserError, disk_errors

SECONDS = 0.5  # between two lines about the progress


def main() -> None:
    parent = os.getppid()
    os.nice(5)  # a run that trains meanwhile comes first
    asked = json.loads(sys.stdin.readline())
    data = from_dict(DataConfig, asked["data"])
    tokenizer = load_tokenizer(asked["tokenizer"])
    # The folder is given: a file that is not in the shards that are asked for may have changed, and would change the name.
    made = prepared.Prepared(data, asked["corpus"], tokenizer, asked["length"], asked["name"])
    inputs = {each.name: each for each in made.corpus.inputs}
    for line in sys.stdin:
        try:
            made.make(_shard(inputs, json.loads(line)), asked["threads"], _Progress(parent))
            _say(made=True)
        except Exception as error:
            _say(**_described(error), where=str(getattr(error, "filename", None) or made.folder))


def _described(error: Exception) -> dict:
    if isinstance(error, UserError):
        return {"error": str(error), "mistake": True, "errno": None}
    number = next(iter(disk_errors(error)), None)
    return {"error": os.strerror(number) if number else traceback.format_exc(), "mistake": False, "errno": number}


def _shard(inputs: dict[str, Input], asked: dict) -> Shard:
    """The shard that was asked for, after a check that its inputs are those that the other process has found."""
    for name, *rest in asked["inputs"]:
        if name not in inputs or json.loads(json.dumps(inputs[name].found)) != [name, *rest]:
            raise UserError(f"{name} has changed since the preparation began: the same command prepares it again")
    return Shard(asked["number"], tuple(inputs[name] for name, *_ in asked["inputs"]), asked["samples"])


class _Progress:
    """Says now and then how many bytes are done. Ends the process when the one that it works for has died."""

    def __init__(self, parent: int):
        self._parent, self._done, self._said = parent, 0, time.monotonic()

    def __call__(self, size: int) -> None:
        self._done += size
        if time.monotonic() - self._said > SECONDS:
            if os.getppid() != self._parent:
                sys.exit(1)
            _say(done=self._done)
            self._done, self._said = 0, time.monotonic()


def _say(**what) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
