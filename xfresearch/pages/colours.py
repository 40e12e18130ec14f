"""The colours of pages and pictures, in a light and a dark theme.

A picture has the colours of the light theme as plain attributes, which every program understands: LaTeX, Inkscape, slides.
Programs that read CSS replace them in dark mode. There a rule finds a colour by its light value, so it needs no name.
"""

from collections.abc import Iterable

RUN_COLOURS = tuple(f"run{number}" for number in range(8))
LIGHT = {
    **{"paper": "#fbfaf6", "wash": "#f2efe6", "ink": "#1d1c1a", "muted": "#6b675f", "rule": "#dcd8cd"},
    **{"model": "#b23d1c", "training": "#86a3ab"},
    **{"run0": "#b23d1c", "run1": "#2b6f96", "run2": "#4d7f32", "run3": "#8a4f9e"},
    **{"run4": "#b27d0a", "run5": "#c9527f", "run6": "#178578", "run7": "#75665a"},
}
DARK = {
    **{"paper": "#171614", "wash": "#2a2724", "ink": "#ebe7de", "muted": "#a09a8e", "rule": "#3a3731"},
    **{"model": "#f0875a", "training": "#6d8e98"},
    **{"run0": "#f0875a", "run1": "#6fb1d6", "run2": "#93c572", "run3": "#c795dc"},
    **{"run4": "#e0b64a", "run5": "#f08fb2", "run6": "#5cc9b9", "run7": "#b8a690"},
}
# {attribute of the light theme: declaration of the dark one}
RULES = {f'{paint}="{LIGHT[name]}"': f"{paint}: {DARK[name]}" for name in LIGHT for paint in ("fill", "stroke")}


def theme() -> str:
    """The CSS of a page: the colours as variables, and the dark ones of its pictures."""
    light, dark = (" ".join(f"--{name}: {value};" for name, value in each.items()) for each in (LIGHT, DARK))
    return f":root {{ {light} }}\n{_in_dark_mode([f':root {{ {dark} }}', *_rules(RULES)])}"


def as_file(svg: str) -> str:
    """An SVG file of an SVG element: with the dark colours of what it has."""
    style = _in_dark_mode(_rules(attribute for attribute in RULES if attribute in svg))
    return str(svg).replace(">", f"><style>{style}</style>", 1)  # a Markup would escape it


def _rules(attributes: Iterable[str]) -> list[str]:
    return [f"[{attribute}] {{ {RULES[attribute]} }}" for attribute in attributes]


def _in_dark_mode(rules: list[str]) -> str:
    return "\n  ".join(["@media (prefers-color-scheme: dark) {", *rules]) + " }"
