"""Preregistration of a study: its ledger has every version of the design with the rule, when it was written, and which runs
existed by then. What would make its runs those of another experiment may not change at all (`require_same_design`).

ledger.json is written before the first run. A change of the design (the margin, an arm, the number of seeds, the metric, the
rule) makes a new version, with all runs that existed before it: they were seen before the rule. With --reuse, the ledgers of
the other studies come along. The report has all versions with their verdicts, which stay: other statistics, runs of other
studies, or another verdict of the same design make a new version, too.

Each version has a digest of all that it states when it is written, and of the versions before with their verdicts; the file
has one of all versions. So a change by hand shows, and a page that quotes a digest fixes what is behind it. Whoever computes
the digests anew can still forge a ledger: only a copy elsewhere, such as a commit, shows that. A digest of 16 digits is from
before 2026-11-29 and covers the design, the statistics and the earlier digests alone; the next version covers all of it.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence

from etils import epath

from xfresearch.runtime import hardware
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import exists, inside, read_object, write_json
from xfresearch.runtime.schema import Maybe, check
from xfresearch.studies.design import Study, described
from xfresearch.studies.measurement import RUNS_FILE, read_runs

DESIGN, LEDGER = "study.json", "ledger.json"
# How verdicts are computed, with their level. A change of verdicts.py, simultaneous.py or rates.py that may change a
# verdict changes these words (tests/studies/test_preregistration.py).
STATISTICS = "simultaneous intervals of all arms and rungs, variances drawn, rates resampled, no parabola over a cliff, 5 %"
# What may not change in a directory with runs: they would be those of another experiment. What may change makes a new
# version of the ledger.
FIXED = ("base", "options", "match", "solve", "multiple", "rates", "extensions", "tune_at", "rate_runs")
GROWING = ("sizes", "arms", "cells", "solve_in")  # their entries may not change either, but may be added and removed
NO_DECISION = ("deviation", "keep", "probes", "tiny")  # options of a design that decide no verdict
SEEN = {"runs": [str], "others": int, "directories": [str]}
VERSION = {"digest": str, "date": str, "commit": str, "statistics": str, "design": dict, "seen": SEEN}
VERSION |= {"verdicts": Maybe([str]), "of": Maybe(str)}
STATED = ("date", "commit", "statistics", "design", "seen")  # verdicts come later, and belong to the versions after
DIGITS, DIGITS_OF_DESIGN = 32, 16


def begin(study: Study, folder, results: Iterable[Mapping], reused: Sequence[str]) -> None:
    """Writes a version of the design, unless the last one is the same and names the directories that it reuses. results:
    those that it has already; reused: directories of other studies. Raises UserError if the ledger was changed by hand."""
    versions, design = read(folder), _deciding(study)
    own = [version for version in versions if not version.get("of")]
    known = list(dict.fromkeys(name for version in own for name in version["seen"]["directories"]))
    new = [path for path in reused if epath.Path(path).name not in known]
    if own and own[-1]["design"] == design and own[-1]["statistics"] == STATISTICS and not new:
        return
    for path in new:
        name = epath.Path(path).name
        versions += [version | {"of": version.get("of") or name} for version in read(path)]
    used = [result["fingerprint"] for result in results]
    existing = set().union(*(read_runs(path).keys() for path in (folder, *reused)))
    directories = [*known, *(epath.Path(path).name for path in new)]
    seen = {"runs": used, "others": len(existing.difference(used)), "directories": directories}
    _write(folder, [*versions, _version(design, seen, versions)])


def _version(design: Mapping, seen: Mapping, before: Sequence[dict]) -> dict:
    """A version of now, after others."""
    date = time.strftime("%Y-%m-%d %H:%M")
    made = {"date": date, "commit": hardware.git_commit(), "statistics": STATISTICS, "design": design, "seen": seen}
    return {"digest": _digest(made, before), **made}


def _write(folder, versions: Sequence[dict]) -> None:
    write_json(epath.Path(folder) / LEDGER, {"versions": versions, "digest": _hashed(versions)})


def read(folder) -> list[dict]:
    """The versions of a study's directory, the oldest first; [] without a ledger. Raises UserError if it is damaged."""
    file = inside(folder, LEDGER)
    if not exists(file):
        return []
    content = check(read_object(file), {"versions": [VERSION], "digest": Maybe(str)}, file)
    versions = content["versions"]
    own = [at for at, version in enumerate(versions) if not version.get("of")]
    for at in own:
        version, whole = versions[at], len(versions[at]["digest"]) != DIGITS_OF_DESIGN
        if version["digest"] != (_digest if whole else _digest_of_design)(version, versions[:at]):
            of = "its design, date and runs, and of the versions before" if whole else "its design"
            raise UserError(
                f"{file}: version {own.index(at) + 1} has the digest {version['digest']}, which is not that of {of}: "
                "restore the file. A new design makes a new version by itself"
            )
    digest, covered = content.get("digest"), any(len(versions[at]["digest"]) == DIGITS for at in own)
    if (digest or covered) and digest != _hashed(versions):
        raise UserError(f"{file} has the digest {digest}, which is not that of its versions and verdicts: restore the file")
    return versions


def conclude(folder, verdicts: Sequence[str]) -> list[dict]:
    """Adds the verdicts to the last version, and returns what a report shows of each version. Verdicts that it has stay:
    others make a new version of the same design."""
    versions = read(folder)
    if versions:
        last = versions[-1]
        if last.get("verdicts", verdicts) != list(verdicts):
            last = _version(last["design"], last["seen"], versions)
            versions.append(last)
        last["verdicts"] = list(verdicts)
        _write(folder, versions)
    return [_shown(version, before) for version, before in zip(versions, [None, *versions], strict=False)]


def _shown(version: Mapping, before: Mapping | None) -> dict:
    names = ("digest", "date", "statistics", "verdicts", "of")
    seen = {name: version["seen"][name] for name in ("others", "directories")} | {"runs": len(version["seen"]["runs"])}
    return {name: version.get(name) for name in names} | {"seen": seen, "changes": _changes(before, version)}


def _changes(before: Mapping | None, version: Mapping) -> list[str]:
    """What differs from the version before: 'margin: 0.02 -> 0.01'."""
    if before is None:
        return []
    old, new, lines = _rule(before), _rule(version), []
    for name in dict.fromkeys((*new, *old)):
        value, other = new.get(name, "none"), old.get(name, "none")
        if isinstance(value, dict) and isinstance(other, dict):
            keys = [key for key in sorted(value.keys() | other.keys()) if other.get(key) != value.get(key)]
            lines += [f"{name}.{key}: {_word(other, key)} -> {_word(value, key)}" for key in keys]
        elif value != other:
            lines.append(f"{name}: {other} -> {value}")
    return lines or ["nothing: computed again"]


def _rule(version: Mapping) -> dict:
    """All that a reader has to know of a version: its design, how verdicts are computed, and the studies that it reuses."""
    reused = ", ".join(version["seen"]["directories"]) or "none"
    return version["design"] | {"statistics": version["statistics"], "reuse": reused}


def _word(of: Mapping, key: str) -> str:
    return "none" if key not in of else " ".join(of[key]) or "the base" if isinstance(of[key], list) else str(of[key])


def _deciding(study: Study) -> dict:
    design = {name: value for name, value in described(study).items() if name not in NO_DECISION}
    return json.loads(json.dumps(design))


def _digest(version: Mapping, before: Sequence[Mapping]) -> str:
    """Of what a version states, and of those before it, also of the studies that it reuses."""
    return _hashed({name: version[name] for name in STATED} | {"before": before})[:DIGITS]


def _digest_of_design(version: Mapping, before: Sequence[Mapping]) -> str:
    """That of a version from before 2026-11-29."""
    own = [each["digest"] for each in before if not each.get("of")]
    stated = {name: version[name] for name in ("design", "statistics")}
    return _hashed(stated | {"before": own})[:DIGITS_OF_DESIGN]


def _hashed(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def require_same_design(study: Study, workdir) -> None:
    """Raises UserError if the directory has runs of another experiment: those of an arm that was changed would be lost. So
    nothing may be added to arms and sizes that it has, either."""
    folder = epath.Path(workdir)
    if not (exists(folder / DESIGN) and exists(folder / RUNS_FILE)):
        return
    before, now = _kept_design(folder), json.loads(json.dumps(described(study)))
    arms = before["arms"].keys() & now["arms"]
    known = {"cells": {f"{size}/{arm}" for size in before["sizes"] for arm in arms}, "solve_in": arms}
    pairs = [(name, before.get(name), now[name]) for name in FIXED]
    for kind in GROWING:
        names = sorted((before[kind].keys() | known.get(kind, set())) & now[kind].keys())
        pairs += [(f"{kind}.{name}", before[kind].get(name), now[kind][name]) for name in names]
    for name, value, other in pairs:
        if value != other:
            raise UserError(
                f"config.{name}={other!r} is not allowed with --workdir={workdir}, which began with {value!r}: use a new "
                "directory, with --reuse of this one for runs that are the same"
            )


def added_sizes(workdir) -> list[str]:
    """The sizes of the design that a directory has."""
    return list(_kept_design(epath.Path(workdir))["sizes"]) if exists(epath.Path(workdir) / DESIGN) else []


def _kept_design(folder) -> dict:
    """The design that a directory began with."""
    kept = read_object(inside(folder, DESIGN))
    missing = [name for name in FIXED if name not in kept]
    missing += [name for name in GROWING if not isinstance(kept.get(name), dict)]
    if missing:
        raise UserError(
            f"{folder / DESIGN} is damaged or of another version (it has no {', '.join(missing)}): restore it, or use a new "
            "directory, with --reuse of this one for runs that are the same"
        )
    return kept
