"""The ledger of a study: every version of its design with the rule, when it was written, and which runs existed by then.

ledger.json is written before the first run. A change of the design (the margin, an arm, the number of seeds, the metric, the
rule) makes a new version, with all runs that existed before it: they were seen before the rule. Each version has a digest of
its own design and of the version before, so a design that is changed by hand shows. With --reuse, the ledgers of the other
studies come along. The report has all versions with their verdicts.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence

from etils import epath

from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import exists, inside, read_object, write_json
from xfresearch.runtime.schema import Maybe, check
from xfresearch.studies.design import Study, described
from xfresearch.studies.running import read_runs

LEDGER = "ledger.json"
STATISTICS = "simultaneous intervals of all arms and rungs, rates resampled, 5 %"  # the rule of verdicts, with its level
NO_DECISION = ("deviation", "keep", "probes", "tiny")  # options of a design that decide no verdict
SEEN = {"runs": [str], "others": int, "directories": [str]}
VERSION = {"digest": str, "date": str, "commit": str, "statistics": str, "design": dict, "seen": SEEN}
VERSION |= {"verdicts": Maybe([str]), "of": Maybe(str)}


def begin(study: Study, folder, results: Iterable[Mapping], reused: Sequence[str]) -> None:
    """Writes a version of the design, unless the last one is the same. results: those that it has already; reused:
    directories of other studies. Raises UserError if the ledger was changed by hand."""
    versions, design = read(folder), _deciding(study)
    own = [version for version in versions if not version.get("of")]
    if own and own[-1]["design"] == design and own[-1]["statistics"] == STATISTICS:
        return
    from xfresearch.runtime.hardware import git_commit

    for path in reused if not own else ():
        name = epath.Path(path).name
        versions += [version | {"of": version.get("of") or name} for version in read(path)]
    used = [result["fingerprint"] for result in results]
    existing = set().union(*(read_runs(path).keys() for path in (folder, *reused)))
    directories = [epath.Path(path).name for path in reused]
    seen = {"runs": used, "others": len(existing.difference(used)), "directories": directories}
    made = {"date": time.strftime("%Y-%m-%d %H:%M"), "commit": git_commit(), "statistics": STATISTICS}
    digest = _digest(design, STATISTICS, versions)
    versions.append({"digest": digest, **made, "design": design, "seen": seen})
    write_json(epath.Path(folder) / LEDGER, {"versions": versions})


def read(folder) -> list[dict]:
    """The versions of a study's directory, the oldest first; [] without a ledger. Raises UserError if it is damaged."""
    file = inside(folder, LEDGER)
    if not exists(file):
        return []
    versions = check(read_object(file), {"versions": [VERSION]}, file)["versions"]
    own = [at for at, version in enumerate(versions) if not version.get("of")]
    for at in own:
        version = versions[at]
        if version["digest"] != _digest(version["design"], version["statistics"], versions[:at]):
            raise UserError(
                f"{file}: version {own.index(at) + 1} has the digest {version['digest']}, which is not that of its design: "
                "restore the file. A new design makes a new version by itself"
            )
    return versions


def conclude(folder, verdicts: Sequence[str]) -> list[dict]:
    """Adds the verdicts to the last version, and returns what a report shows of each version."""
    versions = read(folder)
    if versions:
        versions[-1]["verdicts"] = list(verdicts)
        write_json(epath.Path(folder) / LEDGER, {"versions": versions})
    return [_shown(version, before) for version, before in zip(versions, [None, *versions], strict=False)]


def _shown(version: Mapping, before: Mapping | None) -> dict:
    names = ("digest", "date", "statistics", "verdicts", "of")
    seen = {name: version["seen"][name] for name in ("others", "directories")} | {"runs": len(version["seen"]["runs"])}
    return {name: version.get(name) for name in names} | {"seen": seen, "changes": _changes(before, version)}


def _changes(before: Mapping | None, version: Mapping) -> list[str]:
    """What differs from the version before: 'margin: 0.02 -> 0.01'."""
    if before is None:
        return []
    lines = []
    for name, value in version["design"].items():
        other = before["design"].get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            keys = sorted(value.keys() | other.keys())
            words = [f"{name}.{key}: {_word(other, key)} -> {_word(value, key)}" for key in keys]
            lines += [line for key, line in zip(keys, words, strict=True) if other.get(key) != value.get(key)]
        elif value != other:
            lines.append(f"{name}: {other} -> {value}")
    changed = version["statistics"] != before["statistics"]
    return lines + ([f"statistics: {before['statistics']} -> {version['statistics']}"] if changed else [])


def _word(of: Mapping, key: str) -> str:
    return "none" if key not in of else " ".join(of[key]) or "the base" if isinstance(of[key], list) else str(of[key])


def _deciding(study: Study) -> dict:
    design = {name: value for name, value in described(study).items() if name not in NO_DECISION}
    return json.loads(json.dumps(design))


def _digest(design: Mapping, statistics: str, before: Sequence[Mapping]) -> str:
    """Of a version and of those before it."""
    own = [version["digest"] for version in before if not version.get("of")]
    text = json.dumps({"design": design, "statistics": statistics, "before": own}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
