"""python transformers_peer.py FOLDER REQUEST NAME

Decodes greedily with the model of a Hugging Face folder in `transformers` (peers.py has the protocol). REQUEST is a JSON
file with the token ids of the prompts, all equally long, and the number of tokens to generate; its sampling is not read
here. With the NAME transformers_static the cache is static, and on a GPU `generate` then compiles the model. This file
imports nothing of xfresearch.
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main(folder: str, request: str, name: str) -> None:
    asked = json.loads(Path(request).read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    model.generation_config.eos_token_id = None  # texts do not end early
    prompts_BP = torch.tensor(asked["prompts"], device=device)
    if name == "transformers_static":
        model.generation_config.cache_implementation = "static"
    count = {"min_new_tokens": asked["tokens"], "max_new_tokens": asked["tokens"]}

    def decode() -> list[list[int]]:
        everything = torch.ones_like(prompts_BP)
        tokens_BL = model.generate(prompts_BP, attention_mask=everything, do_sample=False, pad_token_id=0, **count)
        return tokens_BL[:, prompts_BP.shape[1] :].tolist()

    print(json.dumps({"tokens": decode()}), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        decode()
        print(json.dumps({"seconds": time.perf_counter() - began, "loss": None}), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main(*sys.argv[1:])
