"""Draws a block: its sublayers, norms and skips as boxes and arrows, from the bottom to the top.

The drawing is made of the layout and the options alone, so every layout has one: in a run's report, and in docs/models.md.
A sublayer that reads the same input as the sublayer before it is drawn beside it.
"""

from dataclasses import dataclass, field
from html import escape

from xfresearch.models.block_config import BlockConfig
from xfresearch.models.connections.connection import ONE, Connection, Factor
from xfresearch.models.layouts import LAYOUTS, Branch
from xfresearch.models.norms import title
from xfresearch.pages.colours import LIGHT

BOX = 168  # width of a box
GAP = 22  # between two things above each other
SIDE = 28  # between two columns, and between a column and the skip beside it
FILLS = {"mixer": "training", "cross": "training", "feed_forward": "wash", "memory": "model"}
NAMES = {"mixer": "attention", "cross": "cross-attention", "feed_forward": "feed-forward"}


@dataclass
class Canvas:
    """SVG elements. y grows upwards from 0; `svg` turns it over."""

    parts: list[str] = field(default_factory=list)
    right: float = 0.0
    left: float = 0.0
    top: float = 0.0

    def _reach(self, *points: tuple[float, float]) -> None:
        for x, y in points:
            self.left, self.right, self.top = min(self.left, x), max(self.right, x), max(self.top, y)

    def box(self, x: float, y: float, kind: str, text: str, note: str = "", width: float = BOX) -> float:
        """A box with its bottom at y, centred at x. Returns its top."""
        height = 42 if note else 26
        style = f'fill="none" stroke="{LIGHT["muted"]}"' if kind == "norm" else f'fill="{LIGHT[FILLS[kind]]}"'
        self.parts.append(
            f'<rect class="{kind}" x="{x - width / 2:g}" y="{-(y + height):g}" width="{width:g}" height="{height}" '
            f'rx="5" {style}/>'
        )
        first = y + (27 if note else 9)
        self.text(x, first, text, 13, "paper" if kind == "memory" else "ink")
        if note:
            self.text(x, y + 11, note, 10.5, "ink" if kind in ("mixer", "cross") else "muted")
        self._reach((x - width / 2, y), (x + width / 2, y + height))
        return y + height

    def text(self, x: float, y: float, text: str, size: float, colour: str = "ink", anchor: str = "middle") -> None:
        where = f'x="{x:g}" y="{-y:g}" font-size="{size}" text-anchor="{anchor}"'
        self.parts.append(f'<text {where} fill="{LIGHT[colour]}" stroke="none">{escape(text)}</text>')

    def line(self, *points: tuple[float, float], kind: str = "path", arrow: bool = True, colour: str = "ink") -> None:
        path = "M" + "L".join(f"{x:g} {-y:g}" for x, y in points)
        head = f' marker-end="url(#{colour})"' if arrow else ""
        self.parts.append(f'<path class="{kind}" d="{path}" fill="none" stroke="{LIGHT[colour]}"{head}/>')
        self._reach(*points)

    def add(self, x: float, y: float, sign: str = "+") -> float:
        """A circle with a sign, with its bottom at y. Returns its top."""
        self.parts.append(
            f'<circle class="add" cx="{x:g}" cy="{-(y + 9):g}" r="9" fill="{LIGHT["paper"]}" stroke="{LIGHT["ink"]}"/>'
        )
        self.text(x, y + 4.5, sign, 14)
        self._reach((x, y + 18))
        return y + 18

    def svg(self, label: str) -> str:
        left, right, top = self.left - 10, self.right + 10, self.top + 6
        width, height = right - left, top + 8
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{LIGHT[name]}"/></marker>'
            for name in ("ink", "training")
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="block" role="img" aria-label="{escape(label)}" '
            f'width="{width:g}" height="{height:g}" viewBox="{left:g} {-top:g} {width:g} {height:g}" '
            f'font-family="system-ui, sans-serif"><defs>{heads}</defs>{"".join(self.parts)}</svg>\n'
        )



def draw_block(block: BlockConfig, words: bool = True) -> str:
    """The SVG element of a resolved block. `words` adds the options of its sublayers."""
    layout = LAYOUTS[block.layout]
    canvas = Canvas()
    canvas.text(0, 2, "x", 14)
    y = 14.0
    bottom = y  # where the block's input is
    groups = _groups(layout.branches)
    for group in groups:
        start = y + 8
        canvas.line((0, y), (0, start), arrow=False)
        y = _draw_group(canvas, block, group, start, bottom, words)
    canvas.line((0, y), (0, y + GAP))
    canvas.text(0, y + GAP + 6, "y", 14)
    canvas.top += 16
    return canvas.svg(f"A {block.layout.replace('_', '-')} block: {layout.formula}")


def _groups(branches: tuple[Branch, ...]) -> list[list[Branch]]:
    """The sublayers from the bottom to the top; those of one group are beside each other."""
    groups: list[list[Branch]] = []
    for branch in branches:
        if branch.connection.reads == "stream":
            groups.append([branch])
        else:
            groups[-1].append(branch)
    return groups


def _draw_group(canvas, block, group, start: float, bottom: float, words: bool) -> float:
    """Draws the sublayers of a group above `start`, and what their outputs are added to. Returns the top."""
    first = group[0]
    columns = [0.0] if len(group) == 1 else [-(BOX + SIDE) / 2, (BOX + SIDE) / 2]
    y = start
    shared = any(branch.connection.reads == "before" for branch in group)
    if shared:  # one norm for both
        y = _norms(canvas, block, first, "in", 0.0, y)
        fork = y + 8
        canvas.line((0, y), (0, fork), arrow=False)
        y = fork
    tops = []
    for x, branch in zip(columns, group, strict=True):
        if x:
            canvas.line((0, y), (x, y), arrow=False)
        at = y if shared else _norms(canvas, block, branch, "in", x, y)
        at = _sublayer(canvas, block, branch, x, at, words)
        tops.append(_factor(canvas, branch.connection.gain, x, _norms(canvas, block, branch, "out", x, at)))
    top = max(tops)
    # The second sublayer of a group adds to the output of the first one: the stream enters with the first, or not at all.
    added = [each for each in group if each.connection.adds_to != "nothing"]
    skips = added if added[:1] == [first] or len(group) == 1 else []
    if not skips and len(group) == 1:
        return top
    for x, at in zip(columns, tops, strict=True):
        if x:  # both columns meet in the sum
            canvas.line((x, at), (x, top + GAP + 9), (-9 if x < 0 else 9, top + GAP + 9))
        else:
            canvas.line((0, at), (0, top + GAP))
    if not all(branch.connection.ends_in_norm for branch in group):
        _second_stream(canvas, top + 6)
    if skips:
        connection = skips[-1].connection
        _skip(canvas, connection, start if connection.adds_to == "stream" else bottom, top + GAP, columns)
    y = canvas.add(0, top + GAP)
    return _norms(canvas, block, group[-1], "post", 0.0, y)


def _norms(canvas, block: BlockConfig, branch: Branch, place: str, x: float, y: float) -> float:
    """The norm of a sublayer at a place, if it exists. Returns the top."""
    if place not in branch.norms:
        return y
    kind = block.norm_at(f"{branch.name}_{place}").kind
    if kind == "none":
        return y
    canvas.line((x, y), (x, y + GAP))
    return canvas.box(x, y + GAP, "norm", title(kind))


def _sublayer(canvas, block: BlockConfig, branch: Branch, x: float, y: float, words: bool) -> float:
    options = block.sublayers[branch.name]
    canvas.line((x, y), (x, y + GAP))
    name = f"{NAMES[branch.role]}{' without W_O' if branch.bare else ''}"
    top = canvas.box(x, y + GAP, branch.role, name, _short(options.words) if words else "")
    if branch.role == "cross":
        left, height = x - BOX / 2 - SIDE, y + GAP + 6
        canvas.line((left, height), (x - BOX / 2, height), kind="source")
        canvas.text(left - 4, height - 4, "source", 10.5, "muted", "end")
        canvas.left = min(canvas.left, left - 44)
    slots = getattr(options, "memory_slots", 0)
    if slots:
        width = 92
        beside = x - BOX / 2 - SIDE - width / 2
        middle = (y + GAP + top) / 2
        canvas.box(beside, middle - 13, "memory", f"{slots} slots" if words else "memory slots", width=width)
        canvas.line((beside + width / 2, middle), (x - BOX / 2, middle))
    return top


def _short(words: str) -> str:
    """As many of the words as fit into a box."""
    first = words.split(", ")[0]
    return first if len(first) <= 32 else f"{first[:31]}…"


def _factor(canvas, factor: Factor, x: float, y: float) -> float:
    """The factor of a sublayer's output, if it has one. Returns the top."""
    if factor == ONE:
        return y
    canvas.line((x, y), (x, y + GAP))
    top = canvas.add(x, y + GAP, "×")
    text = "trained gain" if factor.trained else f"{factor.value:g}"
    canvas.text(x + 14, y + GAP + 5, text, 10.5, "muted", "start")
    return top


def _skip(canvas, connection: Connection, start: float, to: float, columns: list[float]) -> None:
    """The arrow from the stream at height `start` around the columns to the sum at height `to`."""
    x = max(columns) + BOX / 2 + SIDE
    height = to + 9
    if len(columns) > 1:  # the right column enters the sum from the right: the skip enters from above that line
        canvas.line((0, start), (x, start), (x, height + 13), (0, height + 13), (0, height + 9), kind="skip")
    else:
        canvas.line((0, start), (x, start), (x, height), (9, height), kind="skip")
    skip = connection.skip
    if connection.mixes:
        canvas.text(x + 6, (start + height) / 2, f"{connection.mixes}, mixed", 10.5, "muted", "start")
        canvas.right = max(canvas.right, x + 140)
    constant = "× ∜(2 depth)" if callable(skip.value) else "" if skip == ONE else f"× {skip.value:g}"
    factor = "× trained gain" if skip.trained else constant
    if factor:
        canvas.text(x + 6, (start + height) / 2, factor, 10.5, "muted", "start")
        canvas.right = max(canvas.right, x + 96)


def _second_stream(canvas, y: float) -> None:
    """The branch of a sublayer's output to ResiDual's second stream, on the left."""
    x = -BOX / 2 - SIDE
    canvas.line((0, y), (x, y), kind="sum", colour="training")
    canvas.text(x - 4, y + 5, "sum", 10.5, "muted", "end")
    canvas.left = min(canvas.left, x - 34)
