"""Numbers for the terminal."""

import pytest

from xfresearch.runtime.tables import count


@pytest.mark.parametrize(
    "number, text",
    [(12, "12"), (999, "999"), (1000, "1 k"), (840_000, "840 k"), (999_499, "999 k"), (999_600, "1 M"), (12.34e6, "12.3 M")]
    + [(999_999_999, "1 B"), (7.2449e9, "7.24 B"), (9.996e11, "1 T"), (5e13, "50 T"), (2e15, "2 P"), (123.456, "123")],
)
def test_a_count_has_three_digits_and_the_unit_of_the_rounded_number(number, text):
    assert count(number) == text


def test_a_billion_bytes_or_flops_are_giga():
    assert count(7.2449e9, "G") == "7.24 G" and count(12.34e6, "G") == "12.3 M"
