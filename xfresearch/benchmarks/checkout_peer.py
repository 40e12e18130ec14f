"""python checkout_peer.py CHECKOUT --config FILE ...

Times updates of a config with the code of a checkout, which PYTHONPATH puts before all others (peers.py has the protocol).
So it imports only what every checkout has, by the names that it had and has.
"""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path


def moved(*names: str):
    """A module that has moved: of its names, newest first, the first one whose package this checkout has."""
    there = [name for name in names[:-1] if importlib.util.find_spec(name.rpartition(".")[0])]
    return importlib.import_module([*there, names[-1]][0])


def main(root: str, arguments: list[str]) -> None:
    os.chdir(root)
    import xfresearch

    memory = moved("xfresearch.runtime.memory", "xfresearch.memory")
    parse = moved("xfresearch.run_config.config_files", "xfresearch.run.config_files", "xfresearch.config.files").parse

    assert Path(xfresearch.__file__).is_relative_to(root), f"{xfresearch.__file__} is not in {root}"
    memory.reuse()
    from xfresearch.planning.compiling import prepare
    from xfresearch.training.timing import Timer

    timer = Timer(prepare(parse(arguments)))
    losses = getattr(timer, "losses", [])
    start = {"compile_seconds": getattr(timer, "compile_seconds", None), "losses": losses}
    print(json.dumps(start), flush=True)
    for _ in sys.stdin:
        seconds = timer()
        print(json.dumps({"seconds": seconds, "loss": losses[-1] if losses else None}), flush=True)
    print(json.dumps({"memory_bytes": timer.memory_bytes() if hasattr(timer, "memory_bytes") else None}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
