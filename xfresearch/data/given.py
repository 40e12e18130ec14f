"""Which paths of a stored config this user has given. The config of somebody else's run may name any file of its reader.

What the user of this machine writes, by training or saving, is remembered in the cache by its content. So a run may be
moved or copied, and the paths in the config of any other run are refused until the user names them.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from xfresearch.data.cache import cache_root
from xfresearch.options.reading import to_json
from xfresearch.options.run_options import DataConfig, RunConfig
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import exists, write_text


class NotGiven(str):
    """A name in a stored config that this user has not written. What would open it as a path refuses it."""


def require_given(name: str, what: str, remedy: str) -> None:
    """Raises UserError for a path that only a stored config names. `what` it is, and what the user may do."""
    if isinstance(name, NotGiven):
        where = "is named by the run's config.json, which was not written here, and may be any file of yours"
        raise UserError(f"{what} {str(name)!r} {where}: {remedy}")


def require_given_corpus(corpus: str) -> None:
    """Raises UserError for an entry of data.corpus that only a stored config names, unless it has the form of a data set's
    name, perhaps with its version, and of no path."""
    if not re.fullmatch(r"\w+(/[\w.-]+)?(:\d+\.\d+\.\d+)?", corpus) or Path(corpus).exists():
        require_given(corpus, "corpus", f"--data={shlex.quote(corpus)} reads it")


def remember(config: RunConfig) -> None:
    """Keeps that this user wrote a config.json with this content. If the cache cannot be written, or is deleted, commands
    ask for the paths."""
    if not any(isinstance(name, NotGiven) for name in (*config.data.corpus, config.data.tokenizer)):
        with suppress(OSError, UserError):
            write_text(_file(json.loads(to_json(config))), "")


def as_given(data: DataConfig, config: Mapping) -> DataConfig:
    """`data` of the stored `config`: with the links that it followed if this user wrote it, otherwise without a name that
    is given."""
    with suppress(OSError, UserError):
        if exists(_file(config)):
            return replace(data, links=config["data"].get("links", data.links))
    return replace(data, corpus=tuple(map(NotGiven, data.corpus)), tokenizer=NotGiven(data.tokenizer))


def _file(config: Mapping) -> Path:
    content = json.dumps(config, sort_keys=True).encode()
    return cache_root() / "written" / hashlib.sha256(content).hexdigest()
