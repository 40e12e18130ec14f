"""python decode_peer.py FOLDER REQUEST [NAME]

Decodes with the model of a Hugging Face folder (peers.py has the protocol): with `transformers` if NAME is given, otherwise
with the code of the checkout $PYTHONPATH, which Python puts before all others. REQUEST is a JSON file with the token ids of
the prompts, all equally long, the number of tokens to generate, and the sampling of a checkout. With the NAME
transformers_static the cache is static, and on a GPU `generate` then compiles the model.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path


def of_checkout(folder: str, asked: dict) -> Callable[[], list[list[int]]]:
    """It imports only what every checkout has."""
    root = os.environ["PYTHONPATH"]
    os.chdir(root)
    import xfresearch
    from xfresearch.models.decoding import generate
    from xfresearch.models.sampling import Sampling
    from xfresearch.runtime import memory

    assert Path(xfresearch.__file__).is_relative_to(root), f"{xfresearch.__file__} is not in {root}"
    memory.reuse()
    lm = xfresearch.load(folder, dtype="float32")

    def decode() -> list[list[int]]:
        chunks = generate(lm.config, lm.params, asked["prompts"], asked["tokens"], Sampling(**asked["sampling"]))
        return [sum(parts, []) for parts in zip(*chunks, strict=True)]

    return decode


def of_transformers(folder: str, asked: dict, name: str) -> Callable[[], list[list[int]]]:
    """Greedily. It imports nothing of xfresearch."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    model.generation_config.eos_token_id = None  # texts do not end early
    prompts_BP = torch.tensor(asked["prompts"], device=device)
    if name == "transformers_static":
        model.generation_config.cache_implementation = "static"
    count = {"min_new_tokens": asked["tokens"], "max_new_tokens": asked["tokens"]}

    @torch.inference_mode()
    def decode() -> list[list[int]]:
        everything = torch.ones_like(prompts_BP)
        tokens_BL = model.generate(prompts_BP, attention_mask=everything, do_sample=False, pad_token_id=0, **count)
        return tokens_BL[:, prompts_BP.shape[1] :].tolist()

    return decode


def main(folder: str, request: str, *name: str) -> None:
    asked = json.loads(Path(request).read_text())
    decode = of_transformers(folder, asked, *name) if name else of_checkout(folder, asked)
    print(json.dumps({"tokens": decode()}), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        decode()
        print(json.dumps({"seconds": time.perf_counter() - began, "loss": None}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
