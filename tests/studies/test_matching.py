"""Designs with pairs of texts that the plan refuses."""

from dataclasses import replace

import pytest

from xfresearch.runtime.errors import UserError
from xfresearch.studies import design, study_plan


def test_exact_match_is_of_pairs():
    with pytest.raises(UserError, match="probes='exact_match' is not allowed: .* targets of pairs: a run predicts labels"):
        study_plan.make(design.read(["--config", "configs/studies/playground.py", "--config.probes=('exact_match',)"]))


def test_a_model_without_an_encoder_has_no_source_of_another_pair():
    with pytest.raises(UserError, match="probes='source' is not allowed: it must be probes of models without an encoder"):
        study_plan.make(design.read(["--config", "configs/studies/w_q.py:tiny", "--config.probes=('source',)"]))


def test_all_arms_of_a_size_read_sources_of_one_length():
    study = design.read(["--config", "configs/studies/cross_attention.py:tiny"])
    with pytest.raises(UserError, match="arm cross_merged .*config.source_length: 64 -> 32.* must read the same text"):
        study_plan.make(replace(study, cells={"tiny/cross_merged": ("source_length=32",)}))
