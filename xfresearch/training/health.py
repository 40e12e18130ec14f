"""Whether a run still learns: it fails if its loss or gradient is not finite, or if too many updates were skipped."""

from xfresearch.options.run_options import TrainingConfig

WINDOW = 100  # updates


class Health:
    """Decides after each update whether the run goes on. `skipped` are the numbers of the updates that earlier processes of
    the run have skipped, at least those of the last WINDOW."""

    def __init__(self, config: TrainingConfig, skipped: list[int]):
        self.config = config
        self.skipped = list(skipped)

    def failure(self, step: int, finite: bool, last: bool) -> str:
        """Why the run fails after update `step`, the `last` one or not; '' if it goes on."""
        if self.config.on_nonfinite == "stop":
            return "" if finite else f"the loss or gradient of step {step} (batch {step - 1}) is not finite"
        if not finite:
            self.skipped.append(step)
        self.skipped = [each for each in self.skipped if each > step - WINDOW]
        window = min(WINDOW, step) if last else WINDOW
        if len(self.skipped) <= self.config.skip_limit * window:
            return ""
        counted = f"{len(self.skipped)} of the {min(WINDOW, step)} updates up to step {step} were skipped"
        return f"{counted}, more than training.skip_limit={self.config.skip_limit:g} allows"
