"""The tokenizer files of llama2.c (Karpathy 2023): a SentencePiece vocabulary with its scores, read by run.c.

    int32 longest piece in bytes; then of each id: float32 score, int32 length, its bytes (little-endian)

0 is unknown, 1 <s>, 2 </s>, 3 to 258 are the bytes. A space in front of the text, then the neighbours whose piece has
the best score are joined, the leftmost of equals, until no two are a piece: SentencePiece's BPE.
"""

import re
import struct
from heapq import heapify, heappop, heappush

from xfresearch.data.tokenizers.base import Tokenizer
from xfresearch.errors import UserError

BEGIN, FIRST_BYTE, FIRST_WORD = 1, 3, 259
# run.c's characters: a byte and the continuation bytes after it, four at most.
_CHARACTER = re.compile(rb"[\x00-\x7f\xc0-\xff][\x80-\xbf]{0,3}|[\x80-\xbf]{1,4}")


class Llama2cTokenizer(Tokenizer):
    """<s> stands before every text and nothing after it: it is what tells texts apart, and where run.c stops."""

    def __init__(self, content: bytes):
        self._pieces, self._scores = _read(content)
        words = self._pieces[FIRST_WORD:]
        self._ids = dict(zip(reversed(words), reversed(range(FIRST_WORD, len(self._pieces))), strict=True))
        table = [b""] * FIRST_BYTE + [bytes([i]) for i in range(256)] + words
        super().__init__(table, {"llama2c.bin": content}, begin_of_text=BEGIN, lossless="bytes", dummy_prefix=True)

    def _encode(self, text: bytes) -> list[int]:
        ids = [i for character in _CHARACTER.findall(b" " + text) for i in self._spell(character)] if text else []
        return self._join(ids)

    def _spell(self, character: bytes) -> list[int]:
        i = self._ids.get(character)
        return [FIRST_BYTE + byte for byte in character] if i is None else [i]

    def _join(self, ids: list[int]) -> list[int]:
        """`ids` after all joins. A joined id stands where its left part stood, None where its right part did."""
        ids, after, before = list(ids), list(range(1, len(ids) + 1)), list(range(-1, len(ids) - 1))
        joins = [join for left in range(len(ids) - 1) if (join := self._candidate(ids, left, left + 1))]
        heapify(joins)
        while joins:
            _, left, right, pair, joined = heappop(joins)
            if (ids[left], ids[right]) != pair:
                continue  # one of the two was joined to another before
            ids[left], ids[right], after[left] = joined, None, after[right]
            if after[left] < len(ids):
                before[after[left]] = left
            for neighbours in ((before[left], left), (left, after[left])):
                if join := self._candidate(ids, *neighbours):
                    heappush(joins, join)
        return [i for i in ids if i is not None]

    def _candidate(self, ids: list, left: int, right: int) -> tuple | None:
        """A join of the ids at two places, ordered by its score and then its place; None where they are no piece."""
        if left < 0 or right >= len(ids):
            return None
        joined = self._ids.get(self._pieces[ids[left]] + self._pieces[ids[right]])
        return joined and (-self._scores[joined], left, right, (ids[left], ids[right]), joined)


def _read(content: bytes) -> tuple[list[bytes], list[float]]:
    """The pieces and their scores; UserError where the file is not what run.c reads."""
    pieces, scores, at = [], [], 4
    longest = int.from_bytes(content[:4], "little", signed=True)
    while at < len(content):
        score, length = struct.unpack_from("<fi", content.ljust(at + 8, b"\0"), at)
        piece, at = content[at + 8 : at + 8 + length], at + 8 + length
        if not 0 < length <= longest or at > len(content):
            raise UserError(f"not a whole tokenizer of llama2.c: its piece {len(pieces)} is damaged or cut off")
        pieces.append(piece)
        scores.append(score)
    spelt = [f"<0x{byte:02X}>".encode() for byte in range(256)]
    if pieces[FIRST_BYTE:FIRST_WORD] != spelt:
        raise UserError(f"not a tokenizer of llama2.c: its ids {FIRST_BYTE} to {FIRST_WORD - 1} are not the bytes")
    return pieces, scores
