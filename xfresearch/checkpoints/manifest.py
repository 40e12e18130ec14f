"""The manifest of a run: the data, code and settings that decide its results, beside its config and its state.

Every checkpoint holds the manifest of the process that wrote it. A run may resume only with the same manifest: otherwise it
would not end bit for bit like the uninterrupted run, and an error names the entries that differ. Other devices are allowed,
with a note on standard error.
"""

import re
import sys
from collections.abc import Mapping

from xfresearch.runtime import distributed
from xfresearch.runtime.errors import UserError

# How the names of entries begin that earlier versions, or some callers, do not record.
SOURCE, CONFIG_FILE, SETTING, DEVICES = "source of xfresearch", "config file ", "setting of JAX ", "devices"


class OtherManifest(UserError):
    """A run in `workdir` was saved with other data, code or settings. `differences` lists the entries that differ."""

    def __init__(self, workdir, step: int, differences: str):
        super().__init__(
            f"--workdir={workdir}: step {step} was computed with other data, code or settings ({differences}): restore "
            "them, use a new directory, or --fork to resume all the same"
        )
        self.workdir, self.differences = workdir, differences


def make(batches, heldout, tokenizer, config_files: Mapping[str, str]) -> dict[str, str]:
    """{entry: digest, version, commit or value}. `heldout` and `tokenizer` may be None. `config_files` is what
    identity.config_files returns."""
    from xfresearch.runtime import identity
    from xfresearch.runtime.hardware import git_commit, versions

    corpora = batches.config.data.corpus
    data = {f"train split of {name}": split.digest for name, split in zip(corpora, batches.corpora, strict=True)}
    if heldout is not None:
        data[f"{batches.config.evaluation.split} split of {corpora[0]}"] = heldout.digest
    if tokenizer is not None:
        data["tokenizer"] = tokenizer.digest
    code = {f"version of {name}": text for name, text in versions().items()} | {"commit": git_commit()}
    code |= {SOURCE: identity.source_digest()} | {f"{CONFIG_FILE}{name}": text for name, text in config_files.items()}
    settings = {f"{SETTING}{name}": text for name, text in identity.jax_settings().items()} | identity.compiler_flags()
    return data | code | settings | {DEVICES: identity.devices()}


def of_data(manifest: Mapping[str, str]) -> dict[str, str]:
    """The digests of the data and of the tokenizer in a manifest."""
    return {name: digest for name, digest in manifest.items() if " split of " in name or name == "tokenizer"}


def require_same_everywhere(manifest: dict[str, str]) -> None:
    """Raises UserError in every process if any of them has another manifest than process 0, for example other data."""
    difference = distributed.first_message("; ".join(differences(distributed.shared(manifest), manifest)))
    if difference:
        raise UserError(f"every process needs the data, code and settings of process 0: {difference}")


def require_same(workdir, step: int, saved: dict[str, str], manifest: dict[str, str]) -> None:
    """Raises OtherManifest if the run was `saved` with another manifest than the one it would resume with. Says on standard
    error if the devices differ, and which entries an earlier version did not record."""
    changed = differences(saved, manifest)
    if changed:
        raise OtherManifest(workdir, step, "; ".join(changed))
    notes = []
    before, now = (each.get(DEVICES) for each in (saved, manifest))
    if before != now and before:
        notes.append(f"was saved on {before} and resumes on {now}: sums are added in another order, which changes roundings")
    missing = [kind.strip() for kind in sorted(_kinds(manifest) - _kinds(saved))]
    if missing:
        notes.append(f"does not record {', '.join(missing)}: nobody knows whether they have changed since")
    for note in notes if distributed.first() else ():
        print(f"--workdir={workdir}: step {step} {note}", file=sys.stderr)


def differences(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Lines 'entry: old -> new'. Devices may differ. An entry that only one manifest has is a difference, with three
    exceptions: a held-out split, because evaluation may be switched on and off; a setting, because modules of JAX add some
    when they are imported; an entry of a kind that is missing altogether in one of the manifests."""
    recorded = _kinds(old) & _kinds(new)
    optional = {name for name in old.keys() ^ new.keys() if _is_optional(name, recorded)}
    names = sorted((old.keys() | new.keys()) - optional - {DEVICES})
    changed = [name for name in names if old.get(name) != new.get(name)]
    return [f"{name}: {_short(old.get(name))} -> {_short(new.get(name))}" for name in changed]


def _is_optional(name: str, recorded: set[str]) -> bool:
    """Whether an entry may be in only one of two manifests. `recorded` are the kinds of entries that both have."""
    if " split of " in name:
        return not name.startswith("train ")
    kind = _kind(name)
    return kind == SETTING or bool(kind) and kind not in recorded


def _kinds(manifest: dict[str, str]) -> set[str]:
    return {_kind(name) for name in manifest} - {""}


def _kind(name: str) -> str:
    """The kind of an entry, for kinds that not every manifest has; '' for any other entry."""
    from xfresearch.runtime.identity import FLAGS

    return next((kind for kind in (SOURCE, CONFIG_FILE, SETTING, DEVICES, *FLAGS) if name.startswith(kind)), "")


def _short(value: str | None) -> str:
    if value is None:
        return "(absent)"
    return repr(re.sub("^([0-9a-f]{12})[0-9a-f]+", r"\1", value))  # of a digest, or of a commit, which may end with -dirty
