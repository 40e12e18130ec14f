"""Chat templates in the shape of five families, written for these tests, and a tokenizer with their special tokens."""

import json
from typing import NamedTuple

from tests.data import made_tokenizers

NAMES = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")  # Llama 3.1
NAMES += ("<|im_start|>", "<|im_end|>", "<bos>", "<start_of_turn>", "<end_of_turn>")  # Qwen3, SmolLM; Gemma 3
NAMES += ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>")  # gpt-oss
NAMES += ("[INST]", "[/INST]", "</s>")  # Mistral


class Family(NamedTuple):
    template: str
    end: str  # the token that ends an answer
    joined: bool  # whether both answers of TALK are in one example


LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{%- if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

QWEN = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {{- message.content }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

GEMMA = """{{ bos_token }}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

GPT_OSS = """{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if loop.last and not add_generation_prompt %}
            {%- if message.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
        {%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{% endif %}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

MISTRAL = """{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set messages = messages[1:] if system else messages %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + (system + '\\n\\n' if system and loop.index0 >= messages | length - 2 else '') }}
        {{- message.content + '[/INST]' }}
    {%- else %}{{- ' ' + message.content + '</s>' }}{% endif %}
{%- endfor %}"""

FAMILIES = {
    "llama 3.1": Family(LLAMA, "<|eot_id|>", True),
    "qwen3": Family(QWEN, "<|im_end|>", False),
    "gemma 3": Family(GEMMA, "<end_of_turn>", True),
    "gpt-oss": Family(GPT_OSS, "<|return|>", False),
    "mistral": Family(MISTRAL, "</s>", True),
}
TALK = [
    {"role": "user", "content": "the one?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "a two"},
    {"role": "assistant", "content": "the\nend"},
]


def files_of(family: Family, place: str = "chat_template.jinja") -> dict[str, str]:
    """The files of a tokenizer's folder with this template. The special tokens follow the ordinary ones."""
    from tokenizers import Tokenizer

    hf = Tokenizer.from_str(made_tokenizers.byte_level())
    hf.add_special_tokens(list(NAMES))
    settings = {"bos_token": "<|begin_of_text|>" if "eot_id" in family.template else "<bos>", "eos_token": family.end}
    files = {"tokenizer.json": hf.to_str(), place: family.template, "tokenizer_config.json": json.dumps(settings)}
    if place == "tokenizer_config.json":
        files[place] = json.dumps(settings | {"chat_template": family.template})
    return files
