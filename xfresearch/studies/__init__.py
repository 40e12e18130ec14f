"""Comparisons of variants at equal cost, over seeds, with intervals: python -m xfresearch.study.

A study is a config. `default_study()` is one to fill in, and `read` makes a Study of it, or raises UserError. See
docs/studies.md. The command takes a study from module to module:

design           the question, the arms, and their configs           matching         arms of equal cost
study_plan       runs, hours, and power, before anything runs        preregistration  the design with its rule, in a ledger
allocation       which run is the next one; rates chooses its rate   trials           makes the runs that are left
measurement      trains and measures one run, with its probes        simultaneous     intervals of all differences at once
verdicts         from the results of runs to each verdict            estimates        the other figures; the outcome
report           what was found, in words; report_tables its tables  tracking         the same in a tracker

`sweep` is no study: it trains one config with several values of its options.
"""

from xfresearch.studies.design import Study, default_study, read

__all__ = ["Study", "default_study", "read"]
