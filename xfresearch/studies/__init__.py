"""Comparisons of variants at equal cost, over seeds, with intervals: python -m xfresearch.study.

A study is a config. `default_study()` is one to fill in, and `read` makes a Study of it, or raises UserError.
`xfresearch.studies.report` writes the report of results, `xfresearch.studies.statistics` has the tests. See docs/studies.md.
"""

from xfresearch.studies.design import Study, default_study, read

__all__ = ["Study", "default_study", "read"]
