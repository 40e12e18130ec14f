"""What a file is: decided once, by its first bytes, then by its first lines, then by its name.

A command that is given a file asks `sniff`, reads the kinds that it can read, and refuses the others with `refused`, which
names the kind. A kind that no command reads (BROKEN) is refused wherever it stands.
"""

import codecs
import json
import re
from typing import NamedTuple

from xfresearch.runtime.compression import SUFFIXES, compression_of, opened
from xfresearch.runtime.errors import UserError

HEAD = 1 << 16  # bytes that are looked at
# Of these names, the content is text, whatever it looks like.
PROSE = (".md", ".rst", ".tex", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java", ".js", ".ts", ".sh")
HTML = (".html", ".htm", ".xhtml", *PROSE)
JSON = (".json", ".jsonl", ".ndjson")
BINARY: tuple[str, ...] = (".parquet", ".arrow", ".feather", ".orc", ".npy", ".npz", ".zip", ".tar")
BINARY += (".gguf", ".safetensors", ".pt", ".pth", ".ckpt", ".h5")

BROKEN = ("empty", "git-lfs", "html", "answer")
_BY_BYTES = {  # {kind: (words, how a file of it begins)}; the first that fits
    "gguf": ("a GGUF file, the weights of llama.cpp", rb"GGUF|[a-z]{2}gg[\x01-\x0f]\0\0\0"),
    "parquet": ("a parquet file", rb"PAR1|PARE"),
    "arrow": ("an arrow file", rb"ARROW1\0\0"),
    "arrow stream": ("an arrow stream", rb"\xff{4}...\0[\x0c\x10]\0\0\0"),
    "array_record": (
        "an ArrayRecord file, which a TensorFlow Datasets folder holds",
        rb"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f",
    ),
    "pickle": (
        "a pickle, such as a PyTorch checkpoint, which can run arbitrary code: convert it to safetensors",
        rb"\x80[\x02-\x05]|PK\x03\x04.{26}[^\x00]*?/(data\.pkl|\.format_version|\.storage_alignment|byteorder)",
    ),
    "numpy": ("a NumPy array", rb"\x93NUMPY|PK\x03\x04.{26}[^\x00]*?\.npy"),
    "zip": ("a zip file", rb"PK\x03\x04|PK\x05\x06"),
    "llama2.c": ("a model of llama2.c", rb"24ka"),
    "hdf5": ("an HDF5 file", rb"\x89HDF\r\n\x1a\n"),
    "sqlite": ("an SQLite file", rb"SQLite format 3\0"),
    "avro": ("an Avro file", rb"Obj\x01"),
    "orc": ("an ORC file", rb"ORC.{0,500}?[\x00-\x08\x0e-\x1f]"),
    "pdf": ("a PDF file", rb"%PDF-"),
    "lz4": ("compressed with lz4", rb"\x04\x22\x4d\x18"),
    "7z": ("a 7z file", rb"7z\xbc\xaf\x27\x1c"),
    "rar": ("a rar file", rb"Rar!\x1a\x07"),
    "tar": ("a tar file", rb".{257}ustar"),
    # Its first piece is the unknown one: field 1, length, field 1, length, <unk>.
    "sentencepiece": ("a SentencePiece model", rb"\n[\x02-\x40]\n[\x01-\x30](<unk>|<pad>|<s>|\[UNK\]|\xe2\x96\x81)"),
    "git-lfs": (
        "a git-lfs pointer, not the file that it stands for: fetch that with `git lfs pull` or `hf download`",
        rb"version https://git-lfs\.github\.com/spec/",
    ),
    "answer": (
        "the answer of a server that refused a download: download the file again",
        rb"(Entry|Repository|Revision) not found\s*\Z|Invalid username or password\.\s*\Z|"
        rb"(<\?xml[^>]*>\s*)?<Error>\s*<Code>",
    ),
}
WHAT = {kind: words for kind, (words, _) in _BY_BYTES.items()} | {
    "empty": "the file is empty",
    "html": "an HTML page, as a failed download leaves one: download the file again",
    "text": "text",
    "json lines": "JSON lines",
    "json array": "a JSON array",
    "json objects": "JSON objects, one after another",
    "json object": "one JSON object",
    "csv": "CSV",
    "tsv": "TSV",
    "misnamed": "text under the name of a binary file: give it the name of what it is",
    "tfrecord": "a TFRecord file",
    "safetensors": "a safetensors file, a model's weights",
    "adapter": "weights of an adapter (LoRA), not a whole model",
    "adapter config": "the config of an adapter (LoRA), not of a whole model",
    "tokens": "binary data named .bin, such as token ids or weights: corpus tokens:PATH reads token ids",
    "tiktoken": "a vocabulary of tiktoken",
    "tokenizer.json": "a tokenizer.json",
    "config.json": "the config.json of a Hugging Face folder",
    "index": "an index of safetensors files",
    "compressed": "another compressed file",
    "binary": "binary data of an unknown kind",
}
_MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}  # they begin with those of UTF-16
_MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_PAGE = re.compile(rb"(<!--.*?-->\s*)*<(!doctype\s+html|html)\b", re.I | re.S)
_KEYS = {
    "adapter config": rb'"peft_type"\s*:\s*"',
    "tokenizer.json": rb'"added_tokens"\s*:\s*\[.*"model"\s*:\s*\{|"model"\s*:\s*\{\s*"type"\s*:',
    "index": rb'"weight_map"\s*:\s*\{',
    "config.json": rb'"model_type"\s*:\s*"|"architectures"\s*:\s*\[',
}


class FileFormat(NamedTuple):
    kind: str  # one of WHAT
    compression: str = ""  # one of compression.MAGIC
    encoding: str = "utf-8"  # of text; Python's name


def sniff(path) -> FileFormat:
    """What the file at `path` is. Raises UserError if it cannot be read, or if its compressed beginning is damaged."""
    with opened(path, "") as file:
        head = file.read(HEAD)
    compression = compression_of(head)
    if compression:
        with opened(path, compression) as file:
            head = file.read(HEAD)
        if compression_of(head):
            return FileFormat("compressed", compression)
    file_format = format_of(head, suffix_of(path))
    return file_format._replace(compression=compression)


def suffix_of(path) -> str:
    """The ending of a file's name, in lower case, without that of its compression: '.jsonl' of A.jsonl.zst."""
    name = path.name.lower()
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name[name.rfind(".") :] if "." in name else ""


def format_of(head: bytes, suffix: str = "") -> FileFormat:
    """What a file is that begins with `head`, its first HEAD bytes, and whose name ends in `suffix`."""
    if not head:
        return FileFormat("empty")
    for kind, (_, magic) in _BY_BYTES.items():
        if re.match(magic, head, re.S):
            return FileFormat(kind)
    if 2 <= int.from_bytes(head[:8], "little") <= 100_000_000 and head[8:9] == b"{":
        return FileFormat("adapter" if re.search(rb"\.lora_[AB]\b|\.lora_embedding_", head) else "safetensors")
    encoding = _encoding(head)
    if suffix in (".bin", ".idx") and (b"\0" in head or not encoding):
        return FileFormat("tokens")
    if ".tfrecord" in suffix:
        return FileFormat("tfrecord")
    if not encoding:
        return FileFormat("binary")
    start = head if encoding == "utf-8" else head.decode(encoding, "ignore").encode()
    return FileFormat(_text(start.removeprefix(codecs.BOM_UTF8).lstrip(), suffix, len(head) == HEAD), encoding=encoding)


def _encoding(head: bytes) -> str:
    """Python's name of the encoding of a text: of UTF-8, and of encodings of single bytes, 'utf-8'. '' for binary data."""
    for marks, name in _MARKS.items():
        if head.startswith(marks):
            return name
    zeros = [head[offset::2].count(0) / max(1, len(head) // 2) for offset in (0, 1)]
    if len(head) % 2 == 0 and max(zeros) > 0.4 and min(zeros) == 0:  # most of the characters are Latin
        return "utf-16-be" if zeros[0] else "utf-16-le"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
        return "utf-8"
    except UnicodeDecodeError:
        control = len(re.findall(rb"[\x01-\x08\x0e-\x1f\x7f]", head))
        return "" if b"\0" in head or control > len(head) // 50 else "utf-8"


def _text(start: bytes, suffix: str, cut: bool) -> str:
    """The kind of a text that begins with `start`, which is no space. `cut`: there is more of it."""
    if _PAGE.match(start) and suffix not in HTML:
        return "html"
    if suffix in PROSE:
        return "text"
    if suffix in (".model", ".tiktoken") and re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", start):
        return "tiktoken"
    if suffix in (".csv", ".tsv"):
        return suffix[1:]
    if suffix in BINARY:
        return "misnamed"
    if suffix in (".jsonl", ".ndjson"):
        return "json objects" if _several(start, suffix, cut) else "json lines"
    if start.startswith(b"["):
        return "json array" if suffix in JSON or re.match(rb"\[\s*\{\s*\"", start) else "text"
    if re.match(rb"\{\s*[\"}]", start):
        return _object(start, suffix, cut)
    return "json lines" if suffix in JSON else "text"  # whose reader says that this is not JSON


def _object(start: bytes, suffix: str, cut: bool) -> str:
    """The kind of a text that begins with a JSON object. `cut`: there is more of it."""
    *lines, last = start.split(b"\n")
    lines = [line for line in (lines if cut else [*lines, last]) if line.strip()]
    objects = all(map(_is_object, lines))  # of a line that is longer than the head, only the beginning can be seen
    if objects and len(lines) > 1:
        return "json lines"
    if _several(start, suffix, cut):
        return "json objects"
    for kind, keys in _KEYS.items():
        if re.search(keys, start, re.S):
            return kind
    if cut and not lines or (suffix in JSON and len(lines) > 1 and _is_object(lines[0])):
        return "json lines"
    return "json object" if suffix in JSON else "text"


def _several(start: bytes, suffix: str, cut: bool) -> bool:
    """Whether a text begins with JSON objects that do not end with their lines: over several lines, or several on one."""
    if _is_object(start.partition(b"\n")[0]):
        return False
    decode, text, at, count = json.JSONDecoder().raw_decode, start.decode(errors="ignore"), 0, 0
    try:
        while at < len(text):
            value, end = decode(text, at)
            if not isinstance(value, dict):
                return False
            at, count = len(text) - len(text[end:].lstrip()), count + 1
    except (ValueError, RecursionError):  # of an object that goes on, or the reader says what is wrong
        return count > 0 and (text[at] == "{" and cut or text[at] in "{," and suffix in JSON)
    return count > 1 or suffix in JSON[1:]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def refused(path, file_format: FileFormat, wanted: str) -> UserError:
    """The error that names what the file is, and what is wanted, unless WHAT says what to do."""
    what = f"{file_format.compression} of " * bool(file_format.compression) + WHAT[file_format.kind]
    return UserError(f"{path}: {what}" if ": " in what or file_format.kind in BROKEN else f"{path}: {what}: {wanted}")


def check_whole(path) -> None:
    """Raises UserError for a file that is BROKEN: an empty one, a git-lfs pointer, a server's page."""
    file_format = sniff(path)
    if file_format.kind in BROKEN:
        raise refused(path, file_format, "")
