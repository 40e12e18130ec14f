"""The manifest of a run: everything beside the config and the state that decides how it goes on.

Every checkpoint holds the manifest of the process that wrote it. A resumed run has the same manifest, or is refused with
the entries that differ: it would not end bit for bit like the uninterrupted run.
"""

from collections.abc import Mapping

from xfresearch import distributed
from xfresearch.errors import UserError


class OtherManifest(UserError):
    """A run was saved with other data or versions. `differences` has them in words."""

    def __init__(self, workdir, step: int, differences: str):
        super().__init__(
            f"--workdir={workdir}: step {step} was computed with other data or versions ({differences}): restore them, use "
            "a new directory, or --fork to resume all the same"
        )
        self.differences = differences


def make(batches, heldout, tokenizer) -> dict[str, str]:
    """{entry: digest, version or commit}. `heldout` and `tokenizer` may be None."""
    from xfresearch.hardware import git_commit, versions

    corpora = batches.config.data.corpus
    data = {f"train split of {name}": split.digest for name, split in zip(corpora, batches.corpora, strict=True)}
    if heldout is not None:
        data[f"{batches.config.evaluation.split} split of {corpora[0]}"] = heldout.digest
    if tokenizer is not None:
        data["tokenizer"] = tokenizer.digest
    return data | {f"version of {name}": text for name, text in versions().items()} | {"commit": git_commit()}


def of_data(manifest: Mapping[str, str]) -> dict[str, str]:
    """The digests of the data and of the tokenizer in a manifest."""
    return {name: digest for name, digest in manifest.items() if " split of " in name or name == "tokenizer"}


def require_same_everywhere(manifest: dict[str, str]) -> None:
    """Raises UserError in every process if any of them has another manifest than process 0, for example other data."""
    difference = distributed.first_message("; ".join(differences(distributed.shared(manifest), manifest)))
    if difference:
        raise UserError(f"every process needs the data and versions of process 0: {difference}")


def require_same(workdir, step: int, saved: dict[str, str], manifest: dict[str, str]) -> None:
    """Raises OtherManifest if the run was saved with another manifest than it would resume with."""
    changed = differences(saved, manifest)
    if changed:
        raise OtherManifest(workdir, step, "; ".join(changed))


def differences(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Lines 'entry: old -> new'. An entry that only one of them has counts as well, except a held-out split: evaluation
    may be switched on and off."""
    optional = {name for name in old.keys() ^ new.keys() if " split of " in name and not name.startswith("train ")}
    names = sorted((old.keys() | new.keys()) - optional)
    changed = [name for name in names if old.get(name) != new.get(name)]
    return [f"{name}: {_short(old.get(name))} -> {_short(new.get(name))}" for name in changed]


def _short(value: str | None) -> str:
    if value is None:
        return "(absent)"
    name, dash, suffix = value.partition("-")  # a commit may end with -dirty
    return repr(name[:12] + dash + suffix)
