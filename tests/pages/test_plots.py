"""Figures for papers: the data of the page, in the widths of columns, as files that publishers take."""

import io
import re

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread

from xfresearch.pages.charts import Curve
from xfresearch.pages.colours import LIGHT
from xfresearch.pages.figures import HeatMap, LineChart
from xfresearch.pages.plots import DPI, files, plots, saved
from xfresearch.runtime.errors import UserError

POINTS = np.array([[0, 1.0], [1, 3.0], [2, 2.0]])
CHART = LineChart("Loss", "", "step", (Curve(POINTS, "run1", half=np.full(3, 0.5)),), {"gzip": 2.5}, second=("FLOPs", 10.0))
VALUES = np.array([[0.0, 1.0, np.nan], [0.5, -1.0, 0.25]])
MAP = HeatMap("Heads", "", VALUES, "layer", "head", -1.0, 1.0, (" $a", "$b_$", "\n\u4e2d"), ".2f")


@pytest.mark.parametrize("columns, inches", [(1, 3.25), (2, 6.75)])
def test_figures_are_as_wide_as_columns(columns, inches):
    made = plots((CHART, MAP), columns)
    assert list(made) == ["Loss", "Heads"]
    for figure in made.values():
        assert figure.get_size_inches()[0] == inches
        assert imread(io.BytesIO(saved(figure, "png"))).shape[1] == int(inches * DPI)


def test_a_chart_has_the_curves_of_the_page():
    axes = plots([CHART])["Loss"].axes[0]
    curve, level = axes.lines
    np.testing.assert_array_equal(np.transpose(curve.get_data()), POINTS)
    assert to_hex(curve.get_color()) == LIGHT["run1"] and set(level.get_ydata()) == {2.5}
    band = axes.collections[0].get_datalim(axes.transData)
    assert (band.y0, band.y1) == (0.5, 3.5) and axes.get_xlabel() == "step"


def test_a_heat_map_has_the_values_texts_and_names_of_the_page():
    axes = plots([MAP])["Heads"].axes[0]
    np.testing.assert_array_equal(axes.collections[0].get_array(), VALUES)
    assert [text.get_text() for text in axes.texts] == ["0.00", "1.00", "0.50", "-1.00", "0.25"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["·$a", "$b_$", "\\n\u4e2d"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")
    colours = axes.collections[0].to_rgba(np.array([-1.0, 0.0, 1.0]))
    assert [to_hex(each) for each in colours[[0, 2]]] == [LIGHT["training"], LIGHT["model"]] and colours[1, 3] < 0.01


def test_figures_may_not_be_as_wide_as_three_columns():
    with pytest.raises(UserError, match="columns=3 is not allowed: it must be 1 or 2"):
        plots([CHART], 3)


def test_files_have_truetype_fonts_and_are_the_same_each_time():
    made = files((CHART, MAP))
    assert list(made) == [f"figure_{number}.{kind}" for number in range(2) for kind in ("pdf", "png")]
    for name, content in made.items():
        assert content.startswith(b"%PDF" if name.endswith("pdf") else b"\x89PNG")
    fonts = set(re.findall(rb"/Subtype /(\w*Type\w*)", made["figure_0.pdf"]))
    assert fonts and b"Type3" not in fonts
    assert made == files((CHART, MAP))
