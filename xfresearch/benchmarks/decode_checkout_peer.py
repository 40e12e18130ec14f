"""python decode_checkout_peer.py FOLDER REQUEST

Decodes with the model of a Hugging Face folder and the code of the checkout $PYTHONPATH, which Python puts before all others
(peers.py has the protocol). REQUEST is that of transformers_peer.py. It imports only what every checkout has.
"""

import json
import os
import sys
import time
from pathlib import Path


def main(folder: str, request: str) -> None:
    root = os.environ["PYTHONPATH"]
    os.chdir(root)
    import xfresearch
    from xfresearch.models.decoding import generate
    from xfresearch.models.sampling import Sampling
    from xfresearch.runtime import memory

    assert Path(xfresearch.__file__).is_relative_to(root), f"{xfresearch.__file__} is not in {root}"
    memory.reuse()
    asked = json.loads(Path(request).read_text())
    lm = xfresearch.load(folder, dtype="float32")

    def decode() -> list[list[int]]:
        chunks = generate(lm.config, lm.params, asked["prompts"], asked["tokens"], Sampling(**asked["sampling"]))
        return [sum(parts, []) for parts in zip(*chunks, strict=True)]

    print(json.dumps({"tokens": decode()}), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        decode()
        print(json.dumps({"seconds": time.perf_counter() - began, "loss": None}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
