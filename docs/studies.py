"""python -m docs.studies [--only NAME,...] [--config.key=value ...]

Runs what is missing of the studies that docs/questions answers, each in docs/data/studies/NAME, where git keeps the
design, the results of the runs and the report. A run that several studies have is trained once.
"""

from pathlib import Path

from xfresearch import study
from xfresearch.command import Parser, run
from xfresearch.errors import UserError, nearest
from xfresearch.studies.running import RUNS_FILE

DATA = Path("docs/data/studies")
# In this order. The first ones have the arms that others share.
STUDIES = {
    "w_o": "w_o.py",
    "w_q": "w_q.py",
    "memory": "memory.py",
    "norms": "norms.py",
    "activations": "activations.py",
    "experts": "experts.py",
    "recent": "recent.py",
    "lambda_layers": "lambda_layers.py",
    "single_heads": "single_heads.py",
    "norms_majority": "norms.py:majority",
    "w_q_one_head": "w_q.py:one_head",
    "experts_parameters": "experts.py:parameters",
}


def main(arguments: list[str]) -> None:
    parser = Parser(prog="python -m docs.studies", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"only some of {', '.join(STUDIES)}")
    options, overrides = parser.parse_known_args(arguments)
    chosen = options.only.split(",") if options.only else list(STUDIES)
    for name in chosen:
        if name not in STUDIES:
            raise UserError(f"--only={name} is not allowed: it must be one of {', '.join(STUDIES)}{nearest(name, STUDIES)}")
    for name in chosen:
        others = [str(file.parent) for file in sorted(DATA.glob(f"*/{RUNS_FILE}"))]
        reuse = ["--reuse", *others] if others else []
        print(f"\n{name}", flush=True)
        config = f"configs/studies/{STUDIES[name]}"
        study.main(["--config", config, "--workdir", str(DATA / name), *reuse, *overrides])


if __name__ == "__main__":
    run(main)
