"""The plots of a report as inline SVG. Colours are classes, so that the page's style (light or dark) decides them.

There are two kinds: `rows` compares contestants, and `curves` follows figures over depths, sizes or versions. Every
plot is 360 units wide: one to one on a phone, three in a row on a laptop, and readable on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from xml.etree import ElementTree

from .figures import BatchFigures, Figures, Interval
from .report import Report

WIDTH, HEIGHT = 360, 240
LEFT = 40
RIGHT = 8
TOP = 12
BOTTOM = 38  # margins around the area of `curves`
OTHER = "cx"  # the colour of what is shown for comparison

Corners = Sequence[tuple[float, float]]
_SHAPES: tuple[Corners, ...] = (
    [(4.5 * math.cos(k * math.pi / 12), 4.5 * math.sin(k * math.pi / 12)) for k in range(24)],  # circle
    [(-4, -4), (4, -4), (4, 4), (-4, 4)],
    [(0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)],
    [(0, -5), (5, 4), (-5, 4)],
    [(-5, -4), (5, -4), (0, 5)],
    [(-1.5, -5), (1.5, -5), (1.5, 5), (-1.5, 5)],
    [(-5, -1.5), (5, -1.5), (5, 1.5), (-5, 1.5)],
)

Scale = Callable[[float], float]
Svg = ElementTree.Element


def speedup(report: Report, temperature: float) -> str:
    """Return a plot of the speedup of each contestant over the plain target at one temperature."""
    shown = [f for f in report.overall(temperature) if f.contestant != report.baselines.plain]
    marks = {report.contestant(f.contestant).label: [(f.speedup, _colour(report, f.contestant))] for f in shown}
    return rows(f"Speedup over the plain target at temperature {temperature:g}", marks, 0, "×")


def tau_by_contestant(report: Report) -> str:
    """Return a plot of τ: one row per drafter, the highest first, a marker per temperature."""
    return _at_every_temperature(report, "τ, tokens per round", lambda f: f.tau, 1, "")


def speedup_by_contestant(report: Report) -> str:
    """Return a plot of the speedup of each drafter at every temperature, in the order of their τ."""
    return _at_every_temperature(report, "Speedup over the plain target", lambda f: f.speedup, 0, "×")


def _at_every_temperature(
    report: Report, title: str, figure: Callable[[Figures], Interval | None], least: float, unit: str
) -> str:
    heats = report.conditions.temperatures
    names = [name for name in report.ranked() if name != report.baselines.plain]
    marks = {
        name: [(figure(report.headline(name, heat)), colour_of(k)) for k, heat in enumerate(heats)] for name in names
    }
    return rows(title, marks, least, unit, [f"temperature {heat:g}" for heat in heats])


def rows(
    title: str,
    marks: Mapping[str, Sequence[tuple[Interval | None, str]]],
    least: float,
    unit: str,
    legend: Sequence[str] = (),
) -> str:
    """Return a plot of figures with intervals, from `least` on: under each name a line for each of its marks.

    Args:
        marks: by name, figures and their colours; None for a line that stays empty.
        legend: what each colour means; () where the page has one.
    """
    high = max([least + 0.5, 1.0, *(top_of(value) for of in marks.values() for value, _ in of if value is not None)])
    most = nice_limit(high)
    x = _scale(least, most, 4, WIDTH - 14)
    top = 10
    base = top + sum(26 + 18 * len(of) for of in marks.values())
    words = "; ".join(
        f"{name} {value.text(unit=unit)}" for name, of in marks.items() for value, _ in of if value is not None
    )
    svg = _svg(base + 34 + 18 * len(legend), title, words)
    for tick in _ticks(most, least):
        _line(svg, x(tick), top, x(tick), base, "grid")
        _text(svg, x(tick), base + 16, f"{tick:g}{unit}", "tick", "middle" if tick > least else "start")
    if least < 1:
        _line(svg, x(1), top, x(1), base, "reference")
    y = top
    for name, of in marks.items():
        _text(svg, 4, y + 13, _shortened(name, 40), "name", "start")
        for k, (value, colour) in enumerate(of):
            if value is not None:
                _across(svg, value, x, y + 27 + 18 * k, colour, unit)
        y += 26 + 18 * len(of)
    for k, meaning in enumerate(legend):
        _legend_line(svg, base + 30 + 18 * k, colour_of(k), meaning)
    return _string(svg)


def _across(svg: Svg, interval: Interval, x: Scale, y: float, colour: str, unit: str) -> None:
    """Return a plot of a marker and its interval on a line of its own, and the figure where there is room."""
    start, end = x(interval.lowest), x(interval.highest)
    if interval.known:
        _line(svg, start, y, end, y, f"spread {colour}")
    _marker(svg, x(interval.value), y, colour)
    at, anchor = (end + 9, "start") if end < WIDTH - 52 else (start - 9, "end")
    _text(svg, at, y + 4, interval.main(unit=unit), "value", anchor)


def alpha(report: Report, temperature: float) -> str:
    """Return a plot of conditional acceptance at each depth, one line per drafter."""
    lines = {f.contestant: {str(d.depth): d.alpha for d in f.alpha} for f in report.overall(temperature) if f.alpha}
    colours = [_colour(report, name) for name in lines]
    return curves(f"Alpha by depth at temperature {temperature:g}", "depth", lines, (0, 1), colours=colours)


def accepted(report: Report, temperature: float) -> str:
    """Return a plot of the share of rounds by number of accepted drafts, one line per drafter."""
    shown = [f for f in report.overall(temperature) if f.accepted]
    lines = {f.contestant: {str(a.accepted): a.share for a in f.accepted} for f in shown}
    most = min(1, nice_limit(max([0.1, *(top_of(a.share) for f in shown for a in f.accepted)])))
    title = f"Accepted drafts per round at temperature {temperature:g}, share of rounds"
    colours = [_colour(report, name) for name in lines]
    return curves(title, "accepted drafts per round", lines, (0, most), "%", colours)


def speedup_by_batch(batches: Sequence[BatchFigures], temperature: float) -> str:
    """Return a plot of the speedup over the plain target by batch size, one line per drafter."""
    lines: dict[str, dict[str, Interval]] = {}
    for f in sorted(batches, key=lambda f: f.size):
        if f.temperature == temperature and f.tau is not None:
            lines.setdefault(f.contestant, {})[str(f.size)] = f.speedup
    most = nice_limit(max([1.0, *(top_of(interval) for line in lines.values() for interval in line.values())]))
    title = f"Speedup over the plain target by batch size at temperature {temperature:g}"
    return curves(title, "batch size", lines, (0, most), "×")


def curves(
    title: str,
    axis: str,
    lines: Mapping[str, Mapping[str, Interval]],
    limits: tuple[float, float],
    unit: str = "",
    colours: Sequence[str] | None = None,
) -> str:
    """Return a plot of lines with intervals over places that are as far apart as they are many; a dashed line marks 1.

    Args:
        axis: what the places are.
        lines: by name, figures by the label of their place, in order.
        limits: where the vertical axis begins and ends. unit: of the figures; "%" for shares.
        colours: of the lines, which the page explains; None for those of a legend of the plot's own.
    """
    labels = list(dict.fromkeys(place for line in sorted(lines.values(), key=len, reverse=True) for place in line))
    x = _scale(-0.5, max(1, len(labels)) - 0.5, LEFT, WIDTH - RIGHT)
    y = _scale(*limits, HEIGHT - BOTTOM, TOP)
    svg = _svg(HEIGHT + (18 * len(lines) if colours is None else 0), title, _described(lines, unit))
    for tick in _ticks(limits[1], limits[0]):
        _line(svg, LEFT, y(tick), WIDTH - RIGHT, y(tick), "grid" if tick else "base")
        _text(svg, LEFT - 6, y(tick) + 4, f"{tick:.0%}" if unit == "%" else f"{tick:g}{unit}", "tick", "end")
    every = 1 + len(labels) // 8
    for i in range(0, len(labels), every):
        label = _shortened(labels[i], max(4, 48 * every // len(labels)))
        _text(svg, x(i), HEIGHT - BOTTOM + 16, label, "tick", "middle")
    _text(svg, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, _shortened(axis, 55), "axis", "middle")
    if limits[0] < 1 < limits[1]:
        _line(svg, LEFT, y(1), WIDTH - RIGHT, y(1), "reference")
    for k, (name, line) in enumerate(lines.items()):
        colour = colour_of(k) if colours is None else colours[k]
        aside = 4 * (k - (len(lines) - 1) / 2)  # so that intervals at one place do not hide each other
        _curve(svg, [(x(labels.index(label)) + aside, figure) for label, figure in line.items()], y, colour)
        if colours is None:
            _legend_line(svg, HEIGHT + 18 * k + 8, colour, _shortened(name, 45))
    return _string(svg)


def _described(lines: Mapping[str, Mapping[str, Interval]], unit: str) -> str:
    """Return the figures of all lines in words, for those who see no plot."""
    times = "×" if unit == "×" else ""
    return "; ".join(
        f"{name} " + ", ".join(f"{place}: {figure.text(unit=times)}" for place, figure in line.items())
        for name, line in lines.items()
    )


def _curve(svg: Svg, points: Sequence[tuple[float, Interval]], y: Scale, colour: str) -> None:
    """Return a plot of a line through points, each with its interval."""
    where = " ".join(f"{x:.1f},{y(interval.value):.1f}" for x, interval in points)
    ElementTree.SubElement(svg, "polyline", {"points": where, "class": f"curve {colour}"})
    for x, interval in points:
        if interval.known:
            _line(svg, x, y(interval.low), x, y(interval.high), f"spread {colour}")
        _marker(svg, x, y(interval.value), colour)


def legend(report: Report) -> list[tuple[str, str]]:
    """Return the marker, as SVG, and the label of every drafter."""
    entries = []
    for drafter in (c for c in report.contestants if c.kind == "drafter"):
        size = {"viewBox": "-7 -7 14 14", "width": "14", "height": "14", "aria-hidden": "true"}
        svg = ElementTree.Element("svg", size)
        _marker(svg, 0, 0, _colour(report, drafter.name))
        entries.append((_string(svg), drafter.label))
    return entries


_LIGHT = ("#1f5fae", "#b4530a", "#1d7a57", "#7a3fb0", "#a8265f", "#6b6a12", "#007c9e")
_DARK = ("#6ea8ef", "#f0a05a", "#5fc79d", "#bf94ee", "#f08bb4", "#cfcb5e", "#5cc6e0")
_SHAPE_RULES = (
    "text{font:12px system-ui,sans-serif} .reference{stroke-dasharray:4 3} "
    ".spread{stroke-width:1.6;opacity:.75} .curve{fill:none;stroke-width:2}"
)


def standalone(svg: str) -> str:
    """Return a plot as a file of its own, in the page's colours, light or dark. Some viewers support no variables."""
    light = _rules("#fdfdfc", "#1c1e21", "#585d66", "#e8eaee", _LIGHT)
    dark = _rules("#15171a", "#e7e9ec", "#a3a9b3", "#2a2e35", _DARK)
    style = f"<style>{light} {_SHAPE_RULES} @media (prefers-color-scheme: dark){{{dark}}}</style>"
    named = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return named.replace("<title>", f"{style}<title>", 1) + "\n"


def _rules(page: str, ink: str, soft: str, grid: str, contestants: Sequence[str]) -> str:
    fixed = (
        f"svg{{background:{page}}} text{{fill:{ink}}} .tick,.axis{{fill:{soft}}} .grid{{stroke:{grid}}} "
        f".base{{stroke:{soft}}} .reference{{stroke:{ink}}}"
    )
    named = {colour_of(i): colour for i, colour in enumerate(contestants)} | {OTHER: soft}
    return fixed + "".join(
        f" .{name}{{stroke:{colour}}} .fill.{name}{{fill:{colour};stroke:none}}" for name, colour in named.items()
    )


def colour_of(place: int) -> str:
    """Return the colour of the line, mark or contestant at a place."""
    return f"c{place % len(_SHAPES)}"


def _colour(report: Report, name: str) -> str:
    """Return the colour of a drafter by its place among them; `OTHER` for a baseline."""
    drafters = [c.name for c in report.contestants if c.kind == "drafter"]
    return colour_of(drafters.index(name)) if name in drafters else OTHER


def _legend_line(svg: Svg, y: float, colour: str, meaning: str) -> None:
    _marker(svg, LEFT + 6, y, colour)
    _text(svg, LEFT + 18, y + 4, meaning, "name", "start")


def _marker(svg: Svg, x: float, y: float, colour: str) -> None:
    """Return a plot of a marker, whose shape differs like its colour."""
    corners = _SHAPES[0 if colour == OTHER else int(colour[1:])]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    ElementTree.SubElement(svg, "polygon", {"points": points, "class": f"fill {colour}"})


def _svg(height: float, title: str, description: str) -> Svg:
    size = {"viewBox": f"0 0 {WIDTH} {height:g}", "role": "img", "aria-label": f"{title}: {description}."}
    svg = ElementTree.Element("svg", size)
    ElementTree.SubElement(svg, "title").text = title
    return svg


def _line(svg: Svg, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
    ends = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    ElementTree.SubElement(svg, "line", ends | {"class": kind})


def _text(svg: Svg, x: float, y: float, words: str, kind: str, anchor: str) -> None:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "class": kind, "text-anchor": anchor}
    ElementTree.SubElement(svg, "text", place).text = words


def _string(svg: Svg) -> str:
    return ElementTree.tostring(svg, encoding="unicode")


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def nice_limit(value: float) -> float:
    """Return the next multiple of a round step that holds `value`."""
    return math.ceil(value * 1.02 / _step(value)) * _step(value)


def _ticks(limit: float, least: float) -> list[float]:
    step = _step(limit - least)
    return [round(i * step, 10) for i in range(math.ceil(least / step - 1e-9), int(limit / step + 1e-9) + 1)]


def _step(span: float) -> float:
    """Return a round distance that gives about four ticks over a span."""
    raw = span / 4
    magnitude = 10 ** math.floor(math.log10(raw))
    return next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)


def top_of(interval: Interval) -> float:
    """Return the upper end of an interval; 0 where there is no value."""
    return interval.highest if math.isfinite(interval.highest) else 0.0


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
