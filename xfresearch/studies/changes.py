"""The study file of a few changes of a model, as `python -m xfresearch.study --arms CHANGE ...` makes it.

A change is 'KEY=VALUE KEY=VALUE ...' or 'NAME: KEY=VALUE ...'. A key may leave out 'model.' and 'model.blocks.main.'. The
file has defaults for an honest comparison, which its reader can change: each arm tries learning rates around the base's,
has as many FLOPs as the base by the width of its feed-forward layers (by its updates if it sets that width, or has none),
and trains with five seeds, on ten tokens for each parameter or on as many as the base does.
"""

import re
from collections.abc import Mapping, Sequence

from xfresearch.options.groups import to_config_dict
from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.config import Config
from xfresearch.run_config.config_files import parse
from xfresearch.run_config.resolving import with_vocabulary
from xfresearch.runtime.errors import UserError, nearest
from xfresearch.runtime.files import exists, inside, make_directory, read_bytes, write_text

FILE = "study.py"  # in the directory of the study
BASELINE = "base"
TOKENS = 10  # for each parameter of the base, unless it trains on more
HELD_OUT = 65_536  # tokens: on fewer, the text adds more to the error of a difference than the seeds do
EVALUATIONS = 5  # of a run, for its curve
Overrides = tuple[str, ...]

TEXT = '''\
"""A study of {names}, made by xfresearch study --arms: change it, and run it with --config."""

from xfresearch.studies.design import default_study


def get_config():
    study = default_study()
    study.question = {question!r}
    study.rule = "It does, if the verdict is 'better': at this size, on this text, after so many tokens."
    study.base = {base!r}
    study.options = {options!r}
    study.sizes = {{{size!r}: ()}}
    study.arms = {{
{arms}
    }}
    study.baseline = {baseline!r}
    study.solve, study.solve_in = {solve!r}, {solve_in!r}  # for equal FLOPs
    study.rates, study.rate_runs, study.extensions = {rates!r}, 1, 3  # learning rates that each arm tries
    study.seeds, study.margin, study.deviation = 5, 0.02, 0.012  # the last two in bits per byte
    return study
'''


def file_of(changes: Sequence[str], base: str, corpus: str = "") -> str:
    """The text of the study file of these changes of the config `base`, trained on `corpus` (NAME or PATH, by default the
    base's). Raises UserError for a change that is none, and for a base or a corpus that cannot be read."""
    from xfresearch.data.tokenizers import vocab_size

    given = (f"data.corpus={(corpus,)!r}",) if corpus else ()
    config = parse(["--config", base, *(f"--config.{each}" for each in given)])
    config = with_vocabulary(config, vocab_size(config.data))
    arms = _arms(changes, config)
    solve, solve_in = _solved_for(config, arms)
    rate = config.optimizer.learning_rate
    return TEXT.format(
        names=", ".join(arms),
        question=f"Does {base} predict text better with {' or with '.join(arms)}?",
        base=base,
        options=(*given, *_options(config)),
        size=re.sub(r"[^A-Za-z0-9_-]", "-", base.rpartition(":")[2]) if ":" in base else "base",
        arms="\n".join(f"        {name!r}: {arm!r}," for name, arm in {BASELINE: (), **arms}.items()),
        baseline=BASELINE,
        solve=solve,
        solve_in=solve_in,
        rates=tuple(float(f"{rate * factor:.3g}") for factor in (0.5, 1, 2)),
    )


def write(folder: str, text: str) -> str:
    """Writes a study file into the directory `folder`, and returns its path. Raises UserError if another one is there."""
    file = inside(folder, FILE)
    if not exists(file):
        make_directory(file.parent)
        write_text(file, text)
    elif read_bytes(file) != text.encode():
        go_on = f"--config {file} goes on with it, and another --workdir begins anew"
        raise UserError(f"--workdir={folder} is not allowed: {file} is the file of another study, or was changed: {go_on}")
    return str(file)


def as_changes(arms: Sequence[str] | Mapping[str, Mapping[str, object]]) -> list[str]:
    """Changes as the command has them, of {name: {key: value}} or of changes in words."""
    if isinstance(arms, str):
        return [arms]
    if not isinstance(arms, Mapping):
        return [*arms]
    return [f"{name}: {' '.join(f'{key}={value}' for key, value in arm.items())}" for name, arm in arms.items()]


def _options(config: Config) -> Overrides:
    """Updates and evaluations of a run of every arm."""
    tokens_per_update = config.batch_size * config.sequence_length
    wanted = TOKENS * int(costs(config.model, config.sequence_length).parameters)
    steps = max(config.steps, -(-wanted // tokens_per_update))
    held_out = -(-HELD_OUT // config.sequence_length)
    return f"steps={steps}", f"evaluation.every={-(-steps // EVALUATIONS)}", f"evaluation.final_sequences={held_out}"


def _arms(changes: Sequence[str], config: Config) -> dict[str, Overrides]:
    """{name: overrides} of the changes."""
    arms: dict[str, Overrides] = {}
    for change in changes:
        named = re.fullmatch(r"\s*(?:([\w-]+):\s)?\s*(\S.*?)\s*", change, re.S)
        parts = re.split(r"\s+(?=[\w.]+=)", named[2]) if named else [""]
        if not all(re.match(r"[\w.]+=.", part) for part in parts):
            allowed = "KEY=VALUE KEY=VALUE ..., perhaps after 'NAME: ', such as 'relu2: feed_forward.kind=relu2'"
            raise UserError(f"--arms={change!r} is not allowed: it must be {allowed}")
        name = named[1] if named and named[1] else _name(parts)
        if name in (BASELINE, *arms):
            raise UserError(f"--arms={change!r} is not allowed: there is an arm {name!r} already; begin with 'NAME: '")
        arms[name] = tuple(key for part in parts for key in _full(part.removeprefix("config."), config))
    return arms


def _name(parts: Sequence[str]) -> str:
    """'relu2' for feed_forward.kind=relu2, 'heads-8' for attention.heads=8."""
    split = [part.partition("=") for part in parts]
    named = [value if value[0].islower() else f"{key.rpartition('.')[2]}-{value}" for key, _, value in split]
    return re.sub(r"[^A-Za-z0-9_]+", "-", "-".join(named)).strip("-")


def _full(override: str, config: Config) -> Overrides:
    """The override with its whole key: of the run, of the model, or of every block that has it. Raises UserError if none
    has."""
    first = re.split(r"[.=]", override)[0]
    blocks = to_config_dict(config).model.blocks
    if hasattr(config, first):
        return (override,)
    if hasattr(config.model, first):
        return (f"model.{override}",)
    having = [name for name, block in blocks.items() if first in block]
    if not having:
        known = {*vars(config), *vars(config.model), *(key for block in blocks.values() for key in block)}
        raise UserError(f"--arms={override!r} is not allowed: there is no key {first!r}{nearest(first, sorted(known))}")
    return tuple(f"model.blocks.{name}.{override}" for name in having)


def _solved_for(config: Config, arms: Mapping[str, Overrides]) -> tuple[str, dict[str, str]]:
    """The option that makes FLOPs equal, and {arm: 'steps'} of arms for which it cannot."""
    hidden = "model.blocks.main.feed_forward.hidden"
    if "main" not in config.model.blocks or not hasattr(config.model.blocks["main"], "feed_forward"):
        return "steps", {}
    sets_width = ("feed_forward.hidden", "layout", "width", "depth")
    by_steps = [name for name, arm in arms.items() if any(each.split("=")[0].endswith(sets_width) for each in arm)]
    return hidden, dict.fromkeys(by_steps, "steps")
