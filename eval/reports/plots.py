"""The plots of a report as inline SVG. Colours are classes, so that the page's style (light or dark) decides them.

Every plot is 360 units wide: one to one on a phone, three in a row on a laptop, and readable on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from xml.etree import ElementTree

from .figures import BatchFigures, Figures, Interval
from .report import Report

WIDTH = 360
LEFT, RIGHT, TOP, BOTTOM = 40, 8, 12, 38  # margins around the plotted area
HEIGHT = 240

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
Lines = Mapping[str, Sequence[tuple[int, Interval]]]  # by name: (size, value)


def speedup(report: Report, temperature: float) -> str:
    """Draw horizontal bars of tokens/s relative to the plain target, with intervals."""
    shown = [f for f in report.overall(temperature) if f.contestant != report.baselines.plain]
    row, top = 46, 22
    height = top + row * len(shown) + 34
    most = _nice_limit(max([1.0, *(_top(f.speedup) for f in shown)]))
    x = _scale(0, most, 4, WIDTH - 14)
    svg = _svg(
        height,
        f"Speedup over the plain target at temperature {temperature:g}",
        "; ".join(f"{f.contestant} {f.speedup.text(unit='×')}" for f in shown),
    )
    base = top + row * len(shown)
    for tick in _ticks(most):
        _line(svg, x(tick), top, x(tick), base, "grid")
        _text(svg, x(tick), base + 16, f"{tick:g}×", "tick", "middle" if tick else "start")
    for i, figures in enumerate(shown):
        y = top + i * row
        _line(svg, x(1), y + 17, x(1), y + 38, "reference")  # beside the bar alone: above it stand figures
        colour = _colour(report, figures.contestant)
        label = report.contestant(figures.contestant).label
        _text(svg, 4, y + 12, label if len(label) <= 26 else _shortened(figures.contestant, 26), "name", "start")
        _text(svg, WIDTH - 4, y + 12, figures.speedup.text(unit="×"), "value", "end")
        _rectangle(svg, x(0), y + 19, x(figures.speedup.value) - x(0), 15, f"fill {colour}")
        _whisker(svg, figures.speedup, x, y + 26.5, across=True)
    _text(svg, x(1), top - 9, "plain target", "tick", "middle" if most > 1.35 else "end")
    return _string(svg)


def tau_by_contestant(report: Report) -> str:
    """Draw τ of each drafter at every temperature: one row per drafter, the highest first, a marker per temperature."""
    return _by_contestant(report, "τ, tokens per round", lambda f: f.tau, "", 1.0)


def speedup_by_contestant(report: Report) -> str:
    """Draw the speedup of each drafter at every temperature, in the order of their τ."""
    return _by_contestant(report, "Speedup over the plain target", lambda f: f.speedup, "×", 0.0)


def _by_contestant(
    report: Report, title: str, figure: Callable[[Figures], Interval | None], unit: str, least: float
) -> str:
    names = [n for n in report.ranked() if n != report.baselines.plain]
    heats = report.conditions.temperatures
    values = {(n, t): value for n in names for t in heats if (value := figure(report.headline(n, t))) is not None}
    row, top = 26 + 18 * len(heats), 10
    base = top + row * len(names)
    most = _nice_limit(max([1.0, *(_top(value) for value in values.values())]))
    x = _scale(least, max(most, least + 0.5), 4, WIDTH - 14)
    words = "; ".join(f"{n} at {t:g}: {value.text(unit=unit)}" for (n, t), value in values.items())
    svg = _svg(base + 34 + 18 * len(heats), title, words)
    for tick in (t for t in _ticks(max(most, least + 0.5)) if t >= least):
        _line(svg, x(tick), top, x(tick), base, "grid")
        _text(svg, x(tick), base + 16, f"{tick:g}{unit}", "tick", "middle" if tick > least else "start")
    if least < 1.0:
        _line(svg, x(1), top, x(1), base, "reference")
    for i, name in enumerate(names):
        _text(svg, 4, top + i * row + 13, _shortened(name, 40), "name", "start")
        for k, heat in enumerate(heats):
            if (value := values.get((name, heat))) is not None:
                _across(svg, value, x, top + i * row + 27 + 18 * k, f"c{k % len(_SHAPES)}", unit)
    for k, heat in enumerate(heats):
        _marker(svg, 10, base + 30 + 18 * k, f"c{k % len(_SHAPES)}")
        _text(svg, 22, base + 34 + 18 * k, f"temperature {heat:g}", "tick", "start")
    return _string(svg)


def _across(svg: ElementTree.Element, interval: Interval, x: Scale, y: float, colour: str, unit: str) -> None:
    """Draw a marker and its interval on a row of its own, and the figure where there is room."""
    start, end = x(interval.lowest), x(interval.highest)
    if interval.known:
        _line(svg, start, y, end, y, f"spread {colour}")
    _marker(svg, x(interval.value), y, colour)
    at, anchor = (end + 9, "start") if end < WIDTH - 52 else (start - 9, "end")
    _text(svg, at, y + 4, interval.main(unit=unit), "value", anchor)


def alpha(report: Report, temperature: float) -> str:
    """Draw conditional acceptance at each depth, one line per drafter, with intervals."""
    shown = [f for f in report.overall(temperature) if f.alpha]
    deepest = max((d.depth for f in shown for d in f.alpha), default=1)
    x, y = _scale(0.5, deepest + 0.5, LEFT, WIDTH - RIGHT), _scale(0, 1, HEIGHT - BOTTOM, TOP)
    words = "; ".join(f"{f.contestant} " + ", ".join(d.alpha.main() for d in f.alpha) for f in shown)
    svg = _svg(HEIGHT, f"Alpha by depth at temperature {temperature:g}", words)
    depths = {x(depth): str(depth) for depth in range(1, deepest + 1)}
    _axes(svg, y, [0, 0.25, 0.5, 0.75, 1], lambda v: f"{v:g}", depths, "depth")
    step = x(1) - x(0)
    for i, figures in enumerate(shown):
        aside = (i - (len(shown) - 1) / 2) * 5 / step  # so that intervals at one depth do not hide each other
        own = _scale(0.5 - aside, deepest + 0.5 - aside, LEFT, WIDTH - RIGHT)
        _curve(svg, [(own(d.depth), d.alpha) for d in figures.alpha], y, _colour(report, figures.contestant))
    return _string(svg)


def accepted(report: Report, temperature: float) -> str:
    """Draw the share of rounds by number of accepted drafts: grouped bars, one colour per drafter, with intervals."""
    shown = [f for f in report.overall(temperature) if f.accepted]
    most = max((a.accepted for f in shown for a in f.accepted), default=0)
    limit = _nice_limit(max([0.1, *(_top(a.share) for f in shown for a in f.accepted)]))
    x, y = _scale(-0.5, most + 0.5, LEFT, WIDTH - RIGHT), _scale(0, min(limit, 1), HEIGHT - BOTTOM, TOP)
    words = "; ".join(
        f"{f.contestant} " + ", ".join(f"{a.accepted}: {a.share.value:.0%}" for a in f.accepted) for f in shown
    )
    svg = _svg(HEIGHT, f"Accepted drafts per round at temperature {temperature:g}, share of rounds", words)
    counts = {x(count): str(count) for count in range(most + 1)}
    _axes(svg, y, _ticks(min(limit, 1)), lambda v: f"{v:.0%}", counts, "accepted drafts per round")
    width = min(26.0, 0.76 * (x(1) - x(0)) / max(1, len(shown)))
    for i, figures in enumerate(shown):
        for bar in figures.accepted:
            left, top = x(bar.accepted) + (i - len(shown) / 2) * width, y(bar.share.value)
            kind = f"fill {_colour(report, figures.contestant)}"
            _rectangle(svg, left + 0.5, top, width - 1, y(0) - top, kind)
            _whisker(svg, bar.share, y, left + width / 2, across=False)
    return _string(svg)


def speedup_by_batch(batches: Sequence[BatchFigures], temperature: float) -> str:
    """Draw speedup over the plain target against batch sizes (on a log scale), one line per drafter."""
    lines: dict[str, list[tuple[int, Interval]]] = {}
    for f in sorted(batches, key=lambda f: f.size):
        if f.temperature == temperature and f.tau is not None:
            lines.setdefault(f.contestant, []).append((f.size, f.speedup))
    most = _nice_limit(max([1.0, *(_top(interval) for line in lines.values() for _, interval in line)]))
    title = f"Speedup over the plain target by batch size at temperature {temperature:g}"
    words = partial(Interval.text, unit="×")
    return _by_size(lines, title, "batch size", 0, most, lambda v: f"{v:g}×", words, reference=1)


def shares_by_size(lines: Lines, title: str, axis: str) -> str:
    """Draw shares up to 1 against sizes (on a log scale), one line per name, with intervals and its own legend."""
    least = min([0.9, *(interval.lowest for line in lines.values() for _, interval in line)])
    return _by_size(lines, title, axis, math.floor(least * 10) / 10, 1, lambda v: f"{v:.0%}", lambda i: i.text(3))


def _by_size(
    lines: Lines,
    title: str,
    axis: str,
    least: float,
    most: float,
    label: Callable[[float], str],
    words: Callable[[Interval], str],
    reference: float | None = None,
) -> str:
    """Draw lines over sizes on a log scale, from `least` to `most`, with a legend under the plotted area."""
    sizes = sorted({size for line in lines.values() for size, _ in line})
    x = _scale(math.log2(sizes[0]) - 0.25, math.log2(sizes[-1]) + 0.25, LEFT, WIDTH - RIGHT)
    y = _scale(least, most, HEIGHT - BOTTOM, TOP)
    described = (f"{n} " + ", ".join(f"{size}: {words(i)}" for size, i in line) for n, line in lines.items())
    svg = _svg(HEIGHT + 18 * len(lines), title, "; ".join(described))
    shown = {x(math.log2(size)): f"{size:,}" for size in sizes[:: 1 + len(sizes) // 8]}
    _axes(svg, y, [round(least + tick, 10) for tick in _ticks(most - least)], label, shown, axis)
    if reference is not None:
        _line(svg, LEFT, y(reference), WIDTH - RIGHT, y(reference), "reference")
    for i, (name, line) in enumerate(lines.items()):
        colour = f"c{i % len(_SHAPES)}"
        aside = 4 * (i - (len(lines) - 1) / 2)  # so that intervals at one size do not hide each other
        _curve(svg, [(x(math.log2(size)) + aside, interval) for size, interval in line], y, colour)
        _marker(svg, LEFT + 6, HEIGHT + 18 * i + 8, colour)
        _text(svg, LEFT + 18, HEIGHT + 18 * i + 12, name, "name", "start")
    return _string(svg)


def over_training(lines: Mapping[str, Sequence[tuple[float, float]]], best: str) -> str:
    """Draw the speedup of each candidate over its seconds of training (on a log scale), the best one in colour."""
    points = [point for line in lines.values() for point in line]
    times, values = sorted({time for time, _ in points}), [1.0, *(value for _, value in points)]
    least, most = math.floor(10 * min(values)) / 10, math.ceil(10 * max(values)) / 10 + 0.1
    x = _scale(math.log2(times[0]) - 0.25, math.log2(times[-1]) + 0.25, LEFT, WIDTH - RIGHT)
    y = _scale(least, most, HEIGHT - BOTTOM, TOP)
    words = ", ".join(f"{time:g} s: {value:.2f}×" for time, value in lines[best])
    title = "Speedup over the plain target by seconds of training, predicted, and at last measured"
    svg = _svg(HEIGHT + 18, title, f"{best} {words}")
    ticks = _ticks(most, least)
    across = {x(math.log2(time)): f"{time:.3g}" for time in times}
    _axes(svg, y, ticks, "{:g}".format, across, "speedup by seconds of training")
    _line(svg, LEFT, y(1), WIDTH - RIGHT, y(1), "reference")
    for line in (line for name, line in lines.items() if name != best):
        ends = [(x(math.log2(time)), y(value)) for time, value in line]
        around = [(ends[0][0] - 3, ends[0][1]), *ends, (ends[-1][0] + 3, ends[-1][1])]  # one alone is seen, too
        where = " ".join(f"{a:.1f},{b:.1f}" for a, b in around)
        ElementTree.SubElement(svg, "polyline", {"points": where, "class": "base", "fill": "none"})
    found = [(x(math.log2(time)), Interval(value, math.nan, math.nan)) for time, value in lines[best]]
    _curve(svg, found, y, "c0")
    _marker(svg, LEFT + 6, HEIGHT + 8, "c0")
    _text(svg, LEFT + 18, HEIGHT + 12, _shortened(best, 45), "name", "start")
    return _string(svg)


def by_version(title: str, labels: Sequence[str], values: Sequence[Interval | None], least: float, unit: str) -> str:
    """Draw one figure over versions, in their order, with intervals; a dashed line is at 1."""
    shown = {i: value for i, value in enumerate(values) if value is not None and math.isfinite(value.value)}
    most = max(least + 0.5, _nice_limit(max([1.0, *(_top(value) for value in shown.values())])))
    x, y = _scale(-0.5, len(labels) - 0.5, LEFT, WIDTH - RIGHT), _scale(least, most, HEIGHT - BOTTOM, TOP)
    words = "; ".join(f"{labels[i]} {value.text(unit=unit)}" for i, value in shown.items())
    svg = _svg(HEIGHT, title, words)
    every, same = 1 + len(labels) // 6, _common_beginning(labels)
    named = {x(i): _shortened(label[same:], max(4, 48 * every // len(labels))) for i, label in enumerate(labels)}
    across = {place: text for i, (place, text) in enumerate(named.items()) if i % every == 0}
    ticks = [tick for tick in _ticks(most) if tick >= least]
    _axes(svg, y, ticks, lambda v: f"{v:g}{unit}", across, "version")
    _line(svg, LEFT, y(1), WIDTH - RIGHT, y(1), "reference")
    _curve(svg, [(x(i), value) for i, value in shown.items()], y, "c0")
    return _string(svg)


def _common_beginning(labels: Sequence[str]) -> int:
    """Return how many letters at the beginning tell no label from another, up to the last separator."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*labels, strict=False)) if len(labels) > 1 else ()
    shared = "".join(letters[0] for letters in alike)
    return max(shared.rfind(separator) for separator in "@-_/ ") + 1


_LIGHT = ("#1f5fae", "#b4530a", "#1d7a57", "#7a3fb0", "#a8265f", "#6b6a12", "#007c9e")
_DARK = ("#6ea8ef", "#f0a05a", "#5fc79d", "#bf94ee", "#f08bb4", "#cfcb5e", "#5cc6e0")
_SHAPE_RULES = (
    "text{font:12px system-ui,sans-serif} .reference{stroke-dasharray:4 3} "
    ".spread{stroke-width:1.6;opacity:.75} .curve{fill:none;stroke-width:2}"
)


def standalone(svg: str) -> str:
    """Return a plot as a file of its own, in the page's colours, light or dark. Some viewers know no variables."""
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
    return fixed + "".join(
        f" .c{i}{{stroke:{colour}}} .fill.c{i}{{fill:{colour};stroke:none}}" for i, colour in enumerate(contestants)
    )


def legend(report: Report) -> list[tuple[str, str]]:
    """Return the marker, as SVG, and the label of every drafter."""
    entries = []
    for drafter in (c for c in report.contestants if c.kind == "drafter"):
        size = {"viewBox": "-7 -7 14 14", "width": "14", "height": "14", "aria-hidden": "true"}
        svg = ElementTree.Element("svg", size)
        _marker(svg, 0, 0, _colour(report, drafter.name))
        entries.append((_string(svg), drafter.label))
    return entries


def _curve(svg: ElementTree.Element, points: Sequence[tuple[float, Interval]], y: Scale, colour: str) -> None:
    """Draw a line through points, each with its interval."""
    ElementTree.SubElement(
        svg,
        "polyline",
        {"points": " ".join(f"{x:.1f},{y(interval.value):.1f}" for x, interval in points), "class": f"curve {colour}"},
    )
    for x, interval in points:
        if interval.known:
            _line(svg, x, y(interval.low), x, y(interval.high), f"spread {colour}")
        _marker(svg, x, y(interval.value), colour)


def _marker(svg: ElementTree.Element, x: float, y: float, colour: str) -> None:
    """Draw a marker, whose shape differs like its colour."""
    corners = _SHAPES[int(colour[1:])]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    ElementTree.SubElement(svg, "polygon", {"points": points, "class": f"fill {colour}"})


def _whisker(svg: ElementTree.Element, interval: Interval, scale: Scale, at: float, across: bool) -> None:
    """Draw an interval with end marks along the scaled axis."""
    if not interval.known or interval.low == interval.high:
        return
    low, high, end = scale(interval.low), scale(interval.high), 3.5
    strokes = ((low, at, high, at), (low, at - end, low, at + end), (high, at - end, high, at + end))
    # A rim in the page's colour first: the mark stays visible on a bar of any colour.
    for kind in ("rim", "whisker"):
        for a, b, c, d in strokes:
            if across:
                _line(svg, a, b, c, d, kind)
            else:
                _line(svg, b, a, d, c, kind)


def _axes(
    svg: ElementTree.Element,
    y: Scale,
    ticks: list[float],
    label: Callable[[float], str],
    across: Mapping[float, str],
    axis: str,
) -> None:
    """Draw a horizontal line with its label at each tick, and the labels `across` with the axis's name under them."""
    for tick in ticks:
        _line(svg, LEFT, y(tick), WIDTH - RIGHT, y(tick), "grid" if tick else "base")
        _text(svg, LEFT - 6, y(tick) + 4, label(tick), "tick", "end")
    for place, text in across.items():
        _text(svg, place, HEIGHT - BOTTOM + 16, text, "tick", "middle")
    _text(svg, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, axis, "axis", "middle")


def _svg(height: float, title: str, description: str) -> ElementTree.Element:
    svg = ElementTree.Element(
        "svg", {"viewBox": f"0 0 {WIDTH} {height:g}", "role": "img", "aria-label": f"{title}: {description}."}
    )
    ElementTree.SubElement(svg, "title").text = title
    return svg


def _line(svg: ElementTree.Element, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
    ElementTree.SubElement(
        svg, "line", {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}", "class": kind}
    )


def _rectangle(svg: ElementTree.Element, x: float, y: float, width: float, height: float, kind: str) -> None:
    size = {"width": f"{max(0, width):.1f}", "height": f"{max(0, height):.1f}"}
    ElementTree.SubElement(svg, "rect", {"x": f"{x:.1f}", "y": f"{y:.1f}", **size, "class": kind})


def _text(svg: ElementTree.Element, x: float, y: float, words: str, kind: str, anchor: str) -> None:
    ElementTree.SubElement(
        svg, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "class": kind, "text-anchor": anchor}
    ).text = words


def _string(svg: ElementTree.Element) -> str:
    return ElementTree.tostring(svg, encoding="unicode")


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _nice_limit(value: float) -> float:
    """Return the next multiple of a round step that holds `value`."""
    return math.ceil(value * 1.02 / _step(value)) * _step(value)


def _ticks(limit: float, least: float = 0.0) -> list[float]:
    step = _step(limit - least)
    return [round(i * step, 10) for i in range(math.ceil(least / step - 1e-9), int(limit / step + 1e-9) + 1)]


def _step(limit: float) -> float:
    """Return a round distance that gives about four ticks up to `limit`."""
    raw = limit / 4
    magnitude = 10 ** math.floor(math.log10(raw))
    return next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)


def _top(interval: Interval) -> float:
    """Return the upper end of an interval; 0 where there is no value."""
    return interval.highest if math.isfinite(interval.highest) else 0.0


def _colour(report: Report, name: str) -> str:
    """Return the class `c0`, `c1`, … of a drafter by its place; `cx` for a baseline."""
    drafters = [c.name for c in report.contestants if c.kind == "drafter"]
    return f"c{drafters.index(name) % len(_SHAPES)}" if name in drafters else "cx"


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
