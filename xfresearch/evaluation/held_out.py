"""Held-out data for trained models, and their scores, for all commands that measure a held-out loss."""

from argparse import ArgumentTypeError
from functools import cache, partial

from xfresearch.runtime.errors import UserError
from xfresearch.runtime.terminal import bar as progress_bar


def add_flags(parser) -> None:
    """Adds the flags that choose the held-out data and how they are read."""
    add = parser.add_argument
    positive = at_least(1)
    add("--data", default="", metavar="CORPUS[:PATH]", help="corpus to evaluate on (default: the run's first)")
    add("--split", default="", help="split of the corpus (default: the run's evaluation split)")
    add("--sequence-length", type=positive, default=0, metavar="N", help="tokens per window (default: as in training)")
    add("--stride", type=positive, default=0, metavar="N", help="tokens between windows (default: the window's length)")
    limited = "evaluate only N sequences, the first N of a text (default 0: all)"
    add("--limit", type=at_least(0), default=0, metavar="N", help=limited)
    add("--batch-size", type=positive, default=0, metavar="N", help="sequences per batch (default: as in training)")


def at_least(low: int):
    """An argparse type: integers of at least `low`."""

    def read(text: str) -> int:
        if not text.lstrip("-").isdecimal() or int(text) < low:
            raise ArgumentTypeError(f"{text} is not allowed: it must be an integer of at least {low}")
        return int(text)

    return read


def open_model(path: str, step: int | None = None):
    """The model at `path`, as xf.load reads it, and the mesh of its parameters (None: one device)."""
    from xfresearch.data.cache import enable_compilation_cache
    from xfresearch.loading import loading

    run = loading.run_config(path)
    enable_compilation_cache(run.data)
    mesh = evaluation_mesh(run)
    return loading.load(path, step, mesh), mesh


def evaluation_mesh(run):
    """The mesh of all devices: the `run`'s own if it fits them, otherwise a `data` mesh with all parameters on every
    device. None if there is one device."""
    import jax

    if jax.device_count() == 1:
        return None
    from xfresearch.options.run_options import MeshConfig
    from xfresearch.sharding.mesh import device_mesh, mesh_sizes

    try:
        sizes = mesh_sizes(run.mesh, jax.device_count())
    except UserError:
        sizes = mesh_sizes(MeshConfig(), jax.device_count())
    return device_mesh(sizes, jax.devices(), run.mesh.between)


def read(lm, workdir, options):
    """The held-out data that `options` choose for `lm`, which was loaded from `workdir`: losses.Text if the model predicts
    next tokens, otherwise rows.Rows. Raises UserError if a flag does not fit the model or the data."""
    from xfresearch.data.labels import predicted, predicts_next
    from xfresearch.evaluation import losses, whole_rows

    source = (lm, workdir, options.data, options.split, options.sequence_length)
    if predicts_next(lm.run.data):
        return losses.read_text(*source, options.stride, options.limit)
    for name in ("stride", "per_document"):
        if getattr(options, name, None):
            flag = f"--{name.replace('_', '-')}"
            of = predicted(lm.run.data)
            raise UserError(f"{flag} is not allowed with {workdir}, which predicts {of}: it applies to next tokens only")
    return whole_rows.read_rows(*source, options.limit)


def settings(data) -> dict:
    """The settings of an evaluation of `data` from `read`: the corpus, the split, and the units of the standard error."""
    names = ("corpus", "split", "length", "stride", "unit")
    return {name: getattr(data, name) for name in names if hasattr(data, name)}


class Scorer:
    """Scores held-out data with the parameters of any step of a model. It compiles its programs once for all steps."""

    def __init__(self, lm, data, batch_size: int, mesh=None):
        """`data` is from `read`. `batch_size` is 0 for that of the model's run. `mesh` is that of the parameters."""
        from xfresearch.evaluation import losses
        from xfresearch.sharding import placing

        size = min(losses.batch_size(lm.run, batch_size), len(data.rows))
        self.batch_size, self.place = placing.batch_placer(mesh, size, data.length)
        self.model = lm.config
        self.data = data
        training = lm.run.training
        self.make = cache(partial(losses.make_scorer, lm.config, training.layers, training.loss_rows, mesh))

    def __call__(self, params: dict, title: str):
        """losses.Scores of a text, or rows.row_sums. `title` is that of the progress bar."""
        from xfresearch.evaluation import losses, whole_rows
        from xfresearch.models.context import Execution
        from xfresearch.models.reach import trained_reach

        scorer = self.make(Execution(reach=trained_reach(self.model, params)))
        score = whole_rows.row_sums if isinstance(self.data, whole_rows.Rows) else losses.score_text
        with progress_bar(desc=title, total=len(self.data.rows), unit="seq", disable=None, leave=False) as bar:
            return score(scorer, params, self.data, self.batch_size, bar.update, self.place)
