"""The tokenizer files of llama2.c (Karpathy 2023): a SentencePiece vocabulary with its scores, read by run.c.

    int32 length of the longest piece in bytes; then for each id: float32 score, int32 length, bytes (little-endian)

Id 0 is unknown, 1 is <s>, 2 is </s>, 3 to 258 are the bytes. The encoding is SentencePiece's BPE: put a space in front
of the text, then merge the adjacent pair whose merged piece has the best score, the leftmost of equals, until no pair
forms a piece.
"""

import re
import struct
from heapq import heapify, heappop, heappush

from xfresearch.data.tokenizers.base import Tokenizer
from xfresearch.runtime.errors import UserError

BEGIN, FIRST_BYTE, FIRST_WORD = 1, 3, 259
_GONE = -1  # stands for an id that was merged into its left neighbour
LEAST_SCORE = -1e10  # run.c forms no piece with this score or a smaller one
# A character as run.c reads it: a byte and its continuation bytes, at most four bytes.
_CHARACTER = re.compile(rb"[\x00-\x7f\xc0-\xff][\x80-\xbf]{0,3}|[\x80-\xbf]{1,4}")


class Llama2cTokenizer(Tokenizer):
    """<s> precedes every text and nothing follows a text. So <s> is also the separator, and run.c stops at it."""

    def __init__(self, content: bytes):
        self._pieces, self._scores = _read(content)
        words = self._pieces[FIRST_WORD:]
        self._ids = dict(zip(reversed(words), reversed(range(FIRST_WORD, len(self._pieces))), strict=True))
        table = [b""] * FIRST_BYTE + [bytes([i]) for i in range(256)] + words
        super().__init__(table, {"llama2c.bin": content}, begin_of_text=BEGIN, lossless="bytes", dummy_prefix=True)

    def _encode(self, text: bytes) -> list[int]:
        characters = _CHARACTER.findall(b" " + text) if text else []
        return self._merge([i for character in characters for i in self._character_ids(character)])

    def _character_ids(self, character: bytes) -> list[int]:
        i = self._ids.get(character)
        return [FIRST_BYTE + byte for byte in character] if i is None else [i]

    def _merge(self, ids: list[int]) -> list[int]:
        """`ids` after all merges. A merged id replaces its left part; its right part becomes _GONE."""
        ids = list(ids)
        after = list(range(1, len(ids) + 1))  # a doubly linked list of the ids that are left
        before = list(range(-1, len(ids) - 1))
        merges = [merge for left in range(len(ids) - 1) if (merge := self._candidate(ids, left, left + 1))]
        heapify(merges)
        while merges:
            _, left, right, pair, merged = heappop(merges)
            if (ids[left], ids[right]) != pair:
                continue  # stale: an earlier merge changed one of the two
            ids[left] = merged
            ids[right] = _GONE
            after[left] = after[right]
            if after[left] < len(ids):
                before[after[left]] = left
            for neighbours in ((before[left], left), (left, after[left])):
                if merge := self._candidate(ids, *neighbours):
                    heappush(merges, merge)
        return [i for i in ids if i != _GONE]

    def _candidate(self, ids: list[int], left: int, right: int) -> tuple[float, int, int, tuple[int, int], int] | None:
        """The merge of the ids at two indices, ordered by score and then by index; None if it forms no piece."""
        if left < 0 or right >= len(ids):
            return None
        merged = self._ids.get(self._pieces[ids[left]] + self._pieces[ids[right]])
        return None if merged is None else (-self._scores[merged], left, right, (ids[left], ids[right]), merged)


def _read(content: bytes) -> tuple[list[bytes], list[float]]:
    """The pieces and their scores. Raises UserError if run.c could not read the file."""
    pieces: list = []
    scores = []
    at = 4
    longest = int.from_bytes(content[:4], "little", signed=True)
    while at < len(content):
        score, length = struct.unpack_from("<fi", content.ljust(at + 8, b"\0"), at)
        piece = content[at + 8 : at + 8 + length]
        at += 8 + length
        if not 0 < length <= longest or at > len(content):
            raise UserError(f"not a valid llama2.c tokenizer: piece {len(pieces)} is damaged or truncated")
        if not score > LEAST_SCORE:  # also for NaN
            allowed = f"it must be more than {LEAST_SCORE:g}"
            raise UserError(f"not a valid llama2.c tokenizer: piece {len(pieces)} has the score {score:g}: {allowed}")
        pieces.append(piece)
        scores.append(score)
    byte_pieces = [f"<0x{byte:02X}>".encode() for byte in range(256)]
    if pieces[FIRST_BYTE:FIRST_WORD] != byte_pieces:
        raise UserError(f"not a valid llama2.c tokenizer: ids {FIRST_BYTE} to {FIRST_WORD - 1} must be the bytes")
    return pieces, scores
