"""Inputs that are made hostile on purpose, of formats in which a few bytes ask for any amount of memory or time."""

import base64
import io
import json
import random

import numpy as np
import pyarrow as pa
from pyarrow import ipc, parquet

from tests.data import made_tokenizers as made
from tests.fuzz.mutate import mutate

_MOST = 1 << 24  # bytes of a column while it is made
_LENGTHS, _ROWS = [0, 1, 10, 1000, 1 << 16, 1 << 20, 1 << 23], [1, 3, 300, 10_000, 1_000_000]


def _column(draw: random.Random, kinds: list[str]) -> pa.Array:
    """Texts that are equal or not, as a dictionary, as views, plain, with nulls, in a list, or no texts."""
    length, rows = draw.choice(_LENGTHS), draw.choice(_ROWS)
    how = draw.choice(["dictionary"] * 3 + ["plain", "plain", "nulls", "list", "numbers", "pair"] + kinds)
    if how == "views":
        view = np.zeros((rows, 4), np.int32)
        view[:, 0], view[:, 1] = length, int.from_bytes(b"a" * min(length, 4), "little")
        view[:, 1:] *= 1 if length > 12 else 0x61
        return pa.Array.from_buffers(pa.string_view(), rows, [None, pa.py_buffer(view), pa.py_buffer(b"a" * length)])
    if how == "dictionary":
        index = pa.array(np.zeros(rows, draw.choice([np.int8, np.int32, np.int64])))
        return pa.DictionaryArray.from_arrays(index, pa.array(["a" * length, "b"]))
    rows = max(1, min(rows, _MOST // max(length, 100)))
    texts = ["a" * length] * (rows // 2) + [f"{number} " * (length // 4) for number in range(rows - rows // 2)]
    values = {"nulls": [None, *texts], "list": [texts, []], "numbers": [1] * rows, "pair": [{"en": text} for text in texts]}
    kind = draw.choice([None, pa.large_string(), pa.binary()]) if how == "plain" else None
    return pa.array(values.get(how, texts), kind)


def parquet_file(draw: random.Random) -> bytes:
    column = _column(draw, [])
    sink, plain = io.BytesIO(), pa.types.is_string(column.type) and draw.random() < 0.5
    encoding = draw.choice(["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"])
    parquet.write_table(
        pa.table({"text": column}),
        sink,
        use_dictionary=not plain,
        dictionary_pagesize_limit=1 << 30,
        compression=draw.choice(["none", "snappy", "zstd", "gzip", "lz4"]),
        row_group_size=draw.choice([1, 1000, 1 << 25]) if len(column) < 1000 else 1 << 25,
        data_page_version=draw.choice(["1.0", "2.0"]),
        store_schema=draw.random() < 0.5,
        column_encoding={"text": encoding} if plain else None,
    )
    return _damaged(sink.getvalue(), draw)


def arrow_file(draw: random.Random) -> bytes:
    batch = pa.record_batch({"text": _column(draw, ["views"] * 3)})
    sink = io.BytesIO()
    options = ipc.IpcWriteOptions(compression=draw.choice([None, "zstd", "lz4"]))
    with draw.choice([ipc.new_file, ipc.new_stream])(sink, batch.schema, options=options) as file:
        for _ in range(draw.choice([0, 1, 1, 1, 3])):
            file.write_batch(batch)
    return _damaged(sink.getvalue(), draw)


def _damaged(content: bytes, draw: random.Random) -> bytes:
    return mutate(content, str(draw.random())) if draw.random() < 0.6 else content


_BEFORE = "{% set x = 1 %}{% set ns = namespace(a='a') %}{% macro f() %}a{{ caller and 1 }}{% endmacro %}"
_ATOMS = ["messages", "messages[0]", "bos_token", "x", "ns", "ns.a", "'a'", "'\\ud800'", "1", "0", "-1"]
_ATOMS += ["'%99999999d'", "2.5", "10**9", "range(99999)", "[]", "{}", "none", "true", "namespace(a='a')", "f()"]
_ATOMS += ["f", "caller()", "lipsum(9)"]
_ATOMS += ["strftime_now('%Y')", "raise_exception('no')", "''.__class__", "messages.append(1)", "cycler(1, 2)"]
_ATOMS += ["joiner()", "self"]
_OPERATORS = ["+", "-", "*", "*", "**", "//", "%", "~", "==", "in", "and", "<", "is", "or not"]
_FILTERS = ["list", "join", "join(', ')", "length", "tojson", "tojson(indent=10**9)", "center(10**9)", "string", "int"]
_FILTERS += ["batch(3)", "sort", "upper", "replace('a', 'aa')", "indent(10**8)", "wordwrap(0)", "format(1)"]
_FILTERS += ["pprint", "urlize", "xmlattr"]
_FILTERS += ["map('upper')", "sum", "groupby('role')", "attr('__class__')", "truncate(0)", "slice(10**8)", "unique"]
_FILTERS += ["nothing", "trim"]


def template(draw: random.Random) -> bytes:
    text = _BEFORE + "".join(_statement(draw, draw.randint(0, 3)) for _ in range(draw.randint(1, 3)))
    return mutate(text.encode(), str(draw.random())) if draw.random() < 0.2 else text.encode()


def _statement(draw: random.Random, depth: int) -> str:
    value, inner = _expression(draw, draw.randint(0, 2)), _statement(draw, depth - 1) if depth else "a"
    return draw.choice(
        [
            f"{{{{ {value} }}}}",
            f"{{% set x = {value} %}}{inner}",
            f"{{% for i in range(40) %}}{{% set ns.a = ns.a ~ {value} ~ ns.a %}}{{% endfor %}}{inner}",
            f"{{% for x in {value} %}}{inner}{{% endfor %}}",
            f"{{% for x in range(99999) recursive %}}{inner}{{{{ loop([x]) }}}}{{% endfor %}}",
            f"{{% for x in range(99999) %}}{inner}{{% endfor %}}",
            f"{{% if {value} %}}{inner}{{% else %}}{{% break %}}{{% endif %}}",
            f"{{% macro f(x) %}}{inner}{{{{ f(x) }}}}{{% endmacro %}}{{{{ f({value}) }}}}",
            f"{{% generation %}}{inner}{{% endgeneration %}}",
            f"{{% filter {draw.choice(_FILTERS)} %}}{inner}{{% endfilter %}}",
            f"{{%- if x %}}{inner}{{% endif %}}",
        ]
    )


def _expression(draw: random.Random, depth: int) -> str:
    if not depth or draw.random() < 0.3:
        return draw.choice(_ATOMS)
    left, right = _expression(draw, depth - 1), _expression(draw, depth - 1)
    forms = [f"({left} {draw.choice(_OPERATORS)} {right})", f"({left} | {draw.choice(_FILTERS)})", f"{left}[{right}]"]
    return draw.choice([*forms, f"[{left}] * 10**8", f"({left}).format({right})", "(" * 200 + left + ")" * 200])


_PIECES = ["a", "the", r"\s", "[a-z]", "[^a-z]", r"\p{L}", ".", r"(?!\S)", r"\b", "$", "^", "", r"\1", "(?i:a)"]
_PIECES += ["(?=a)", "("]
_REPEATS = ["", "", "+", "*", "?", "{2,}", "{1,3}", "{999}", "+?", "*+", "{99999}"]
_CONTENTS = ["", "a", "aa", " ", "\u2581", "\ufdfa", "a" * 20, "a" * 1000, "a" * 10**6, "\0", "the"]


def _regex(draw: random.Random, depth: int) -> str:
    parts = []
    for _ in range(draw.randint(1, 3)):
        part = draw.choice(_PIECES) if not depth or draw.random() < 0.4 else f"({_regex(draw, depth - 1)})"
        parts.append(part + draw.choice(_REPEATS))
    return draw.choice(["", "|"]).join(parts)


def _pattern(draw: random.Random) -> dict:
    return {"Regex": _regex(draw, 3)} if draw.random() < 0.6 else {"String": draw.choice(_CONTENTS)}


def _normalizer(draw: random.Random) -> dict:
    content = draw.choice(_CONTENTS)
    charsmap = (8).to_bytes(4, "little") + draw.randbytes(8) + content.encode() + b"\0"
    steps = [{"type": kind} for kind in ("NFKC", "NFD", "Lowercase", "StripAccents", "ByteLevel", "Nmt")]
    steps += [{"type": "Prepend", "prepend": content}, {"type": "Strip", "strip_left": True, "strip_right": True}]
    steps += [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}]
    steps += [{"type": "Replace", "pattern": _pattern(draw), "content": content} for _ in range(12)]
    return draw.choice(steps)


def _splitter(draw: random.Random) -> dict:
    behaviour = draw.choice(["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"])
    invert = draw.random() < 0.3
    steps = [{"type": "Split", "pattern": _pattern(draw), "behavior": behaviour, "invert": invert} for _ in range(4)]
    steps += [{"type": "Whitespace"}, {"type": "Digits", "individual_digits": True}, {"type": "BertPreTokenizer"}]
    return draw.choice([*steps, {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}])


def tokenizer(draw: random.Random) -> bytes:
    values = json.loads(draw.choice([made.byte_level, made.byte_fallback])())
    normalizers = [_normalizer(draw) for _ in range(draw.choice([0, 1, 3, 6]))]
    splitters = [_splitter(draw) for _ in range(draw.choice([0, 1, 2]))]
    if normalizers:
        values["normalizer"] = {"type": "Sequence", "normalizers": normalizers}
    if splitters:
        splitters += filter(None, [values["pre_tokenizer"]])
        values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": splitters}
    return json.dumps(values).encode()
