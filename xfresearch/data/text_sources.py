"""The text sources of the built-in corpora: the documents of each split.

A source that knows its splits has `splits`, `identity()` (a JSON value that changes whenever its documents change, and is
cheap to compute), `documents(split)`, the UTF-8 documents in order, and `n_bytes(split)`, about how many these are. With
`one_stream`, data.packing='stream' joins the documents without a separator. Any other source has `splits`, the `inputs`
(corpus_inputs.py), and `divide(shard)`, each document of a shard with its split.
"""

import hashlib
import os
import re
import sys
import sysconfig
import tokenize
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path

from xfresearch.data.cache import content_of
from xfresearch.data.corpus_files import READER, find_files, read_documents
from xfresearch.data.corpus_inputs import Input, Shard
from xfresearch.data.download import Published
from xfresearch.runtime.errors import UserError

SPLITS = ("train", "validation", "test")
_known_splits: dict[str, list[str]] = {}  # by the inputs of a shard
_ENDS = {"train": 0.90, "validation": 0.95, "test": 1.0}


def split_of(key: bytes) -> str:
    """The split of a document by the hash of `key`: 90 % train, 5 % validation, 5 % test."""
    return _split_at(_share(key))


def _split_at(share: float) -> str:
    return next(split for split in SPLITS if share < _ENDS[split])


def _share(key: bytes) -> float:
    return int.from_bytes(hashlib.sha256(key).digest()[:6], "big") / 2**48


class PythonStdlib:
    """The running interpreter's standard library without its tests, sorted, without duplicates. Split by path hash."""

    splits = SPLITS
    one_stream = False

    def __init__(self):
        self.root = Path(sysconfig.get_paths()["stdlib"])
        if not self.root.is_dir():
            raise UserError(f"corpus 'python_stdlib': this Python has no standard library source at {self.root}")

    def identity(self) -> dict:
        sizes = [(name, (self.root / name).stat().st_size) for name in self._names]
        return {"python": sys.version.split()[0], "files": hashlib.sha256(repr(sizes).encode()).hexdigest()}

    def n_bytes(self, split: str) -> int:
        return sum((self.root / name).stat().st_size for name in self._names if split_of(name.encode()) == split)

    def documents(self, split: str) -> Iterator[bytes]:
        seen = set()
        for name in self._names:
            text = _python_source(self.root / name)
            if text and text not in seen:
                seen.add(text)
                if split_of(name.encode()) == split:
                    yield text

    @cached_property
    def _names(self) -> list[str]:
        found = []
        for directory, below, names in os.walk(self.root):
            # Assigning in place makes os.walk skip the other directories.
            below[:] = [name for name in below if name not in ("test", "site-packages", "dist-packages", "__pycache__")]
            found += [Path(directory, name).relative_to(self.root).as_posix() for name in names if name.endswith(".py")]
        return sorted(found)


def _python_source(path: Path) -> bytes:
    """The file's bytes if its declared encoding and its content are UTF-8, otherwise b""."""
    try:
        with path.open("rb") as file:
            encoding, _ = tokenize.detect_encoding(file.readline)
        text = path.read_bytes()
        text.decode("utf-8")
    except (SyntaxError, UnicodeDecodeError, OSError):
        return b""
    return text if encoding in ("utf-8", "utf-8-sig", "ascii") else b""


class TextFiles:
    """Local files, each an input. Of the shards that sample, the hash of a document's text decides its split; one or two
    documents are cut 90/5/5 at line ends. All other shards are for training."""

    splits = SPLITS
    one_stream = False

    def __init__(self, path: str, field: str, links: str = "inside"):
        self.files = find_files(path, f"text_files:{path}", links)
        self.field = field

    @cached_property
    def inputs(self) -> list[Input]:
        return [self._input(path) for path in self.files]

    def _input(self, path: Path) -> Input:
        def version() -> list:
            stat = path.stat()
            # An edit may keep the size and set the time of modification back, but not that of the change.
            return [READER, self.field, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]

        read = partial(read_documents, path, self.field)
        return Input(str(path.absolute()), path.stat().st_size, read, version, partial(content_of, path))

    def divide(self, shard: Shard) -> Iterator[tuple[str, bytes]]:
        if not shard.samples:
            yield from (("train", text) for text in shard.documents())
            return
        splits = self._splits(shard)
        for split, text in zip(splits, shard.documents(), strict=False):  # making.py finds that an input has changed
            if len(splits) > 2:
                yield split, text
            else:
                yield from ((part, cut) for part, cut in cut_at_lines(text).items() if cut)

    def _splits(self, shard: Shard) -> list[str]:
        """The split of each document of a shard that samples, found once in a process."""
        key = repr([each.found for each in shard.inputs])
        if key not in _known_splits:
            shares = array("d", map(_share, shard.documents()))  # of millions of documents: eight bytes for each
            splits = [_split_at(share) for share in shares]
            if len(shares) > 2:
                _fill_empty_splits(splits, shares)
            _known_splits[key] = splits
        return _known_splits[key]


def _fill_empty_splits(splits: list[str], shares: Sequence[float]) -> None:
    """Fills a split that few documents left empty with the document of nearest hash from a split that has several."""
    for empty in [split for split in SPLITS if split not in splits]:
        counts = Counter(splits)
        movable = [i for i, split in enumerate(splits) if counts[split] > 1]
        splits[min(movable, key=lambda i: abs(shares[i] - _ENDS[empty]))] = empty


def cut_at_lines(text: bytes) -> dict[str, bytes]:
    """`text` in parts of 90/5/5 %, cut after the nearest line end, or between characters if none is within 2 %."""
    cuts = [0, *(_cut_near(text, int(len(text) * _ENDS[split]), len(text) // 50) for split in SPLITS[:-1]), len(text)]
    return {split: text[start:end] for split, (start, end) in zip(SPLITS, pairwise(cuts), strict=True)}


def _cut_near(text: bytes, target: int, reach: int) -> int:
    below = text.rfind(b"\n", target - reach, target) + 1
    above = text.find(b"\n", target, target + reach) + 1
    cuts = [cut for cut in (below, above) if cut]
    return min(cuts, key=lambda cut: abs(cut - target)) if cuts else _character_start(text, target)


def _character_start(text: bytes, position: int) -> int:
    while 0 < position < len(text) and text[position] & 0xC0 == 0x80:
        position -= 1
    return position


class Wikitext2:
    """WikiText-2 (Merity et al. 2016) as published, word-level with <unk>. Concatenated, its articles are the file."""

    splits = SPLITS
    one_stream = True
    version = "wikitext-2-v1"
    files = {
        split: Published(
            "wikitext2",
            "https://wikitext.smerity.com/wikitext-2-v1.zip",
            f"wikitext-2/wiki.{name}.tokens",
            f"sha256:{sha256}",
        )
        for split, name, sha256 in (
            ("train", "train", "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
            ("validation", "valid", "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
            ("test", "test", "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
        )
    }
    _article = re.compile(rb"(?<= \n) = [^=\n](?:[^\n]*[^=\n])? = \n(?= \n)")

    def __init__(self, manual_dir: str, root: Path):
        self.manual_dir = manual_dir
        self.root = root

    def identity(self) -> dict:
        return {split: file.checksum for split, file in self.files.items()}

    def n_bytes(self, split: str) -> int:
        return 10_800_000 if split == "train" else 1_200_000

    def documents(self, split: str) -> Iterator[bytes]:
        text = self.files[split].read(self.manual_dir, self.root)
        starts = [0, *[match.start() for match in self._article.finditer(text)][1:], len(text)]
        yield from (text[start:end] for start, end in pairwise(starts))


class HutterPrize:
    """enwik8 or text8 (Mahoney): the first 90 M bytes, the next 5 M, the last 5 M. A cut may split a character."""

    splits = SPLITS
    one_stream = True
    files = {
        "enwik8": Published(
            "enwik8", "https://mattmahoney.net/dc/enwik8.zip", "enwik8",
            "sha256:2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
        ),
        "text8": Published(
            "text8", "https://mattmahoney.net/dc/text8.zip", "text8", "md5:3bea1919949baf155f99411df5fada7e"
        ),
    }  # fmt: skip

    def __init__(self, name: str, manual_dir: str, root: Path):
        self.file = self.files[name]
        self.manual_dir = manual_dir
        self.root = root

    def identity(self) -> dict:
        return {"checksum": self.file.checksum}

    def n_bytes(self, split: str) -> int:
        return 90_000_000 if split == "train" else 5_000_000

    def documents(self, split: str) -> Iterator[bytes]:
        text = self.file.read(self.manual_dir, self.root)
        first = len(text) * 90 // 100
        second = len(text) * 95 // 100
        yield {"train": text[:first], "validation": text[first:second], "test": text[second:]}[split]
