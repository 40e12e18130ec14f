"""Where a subject stands in a prompt."""

import re
from unicodedata import category

# Scripts that do not separate words, and Hangul, whose particles follow a word without a space.
_JOINED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]"
)


def continued(prompt: str, object_: str) -> str:
    """A prompt and the object that completes it, with a space between them. In Chinese, Japanese, Korean and other scripts
    that do not separate words there is one only if the prompt ends with it."""
    bare = prompt.rstrip(" ")
    joined = bare == prompt and (_JOINED.match(prompt[-1:]) or _JOINED.match(object_[:1]))
    return f"{bare}{'' if joined else ' '}{object_}"


def subject_in(prompt: str, subject: str) -> int:
    """The first place where the subject is a whole word, or whole words; -1 if there is none."""
    return next(iter(_places(prompt, subject)), -1)


def subject_of(prompt: str, subject: str) -> int:
    """The place of the subject in a prompt of a fact, which was made from a template. It is the last place where the subject
    is whole words: a frame or a list in front of it may have the same word. A template may also lengthen the subject."""
    return (_places(prompt, subject) or [prompt.rfind(subject)])[-1]


def _places(prompt: str, subject: str) -> list[int]:
    """All places where the subject is whole words."""
    starts = [match.start() for match in re.finditer(f"(?={re.escape(subject)})", prompt)]
    ends = [start + len(subject) for start in starts]
    return [
        start
        for start, end in zip(starts, ends, strict=True)
        if not _one_word(prompt[:start][-1:], subject[0]) and not _one_word(subject[-1], prompt[end : end + 1])
    ]


def _one_word(left: str, right: str) -> bool:
    """Whether two adjacent characters belong to one word. Either may be missing."""
    return all(c and not _JOINED.match(c) and (c.isalnum() or c == "_" or category(c)[0] == "M") for c in (left, right))
