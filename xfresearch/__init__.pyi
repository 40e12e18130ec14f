# The names of the package for type checkers: __init__.py imports each of them when it is first used.
from xfresearch.compare import compare as compare
from xfresearch.loading.language_model import LanguageModel as LanguageModel
from xfresearch.loading.loading import load as load
from xfresearch.models.taps import Patch as Patch
from xfresearch.run_config.closed_form import costs as costs
from xfresearch.runtime.errors import UserError as UserError
from xfresearch.studies.sweep import sweep as sweep
from xfresearch.study import study as study
from xfresearch.train import train as train
from xfresearch.training.callbacks import Callback as Callback
from xfresearch.training.callbacks import StopTraining as StopTraining
from xfresearch.training.trained_run import Run as Run

__version__: str
