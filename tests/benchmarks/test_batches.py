"""Speedup by batch size: what is drawn."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.batches import speedup_lines
from outrider.eval import Interval
from outrider.eval.reports.figures import BatchFigures
from outrider.eval.reports.plots import speedup_by_size, standalone


def make_point(name: str, size: int, value: float, known: bool = True) -> BatchFigures:
    interval = Interval(value, value - 0.1, value + 0.1) if known else Interval(value, float("nan"), float("nan"))
    return BatchFigures(
        contestant=name,
        size=size,
        groups=8,
        sequences=8,
        tokens=80,
        tokens_per_second=interval,
        speedup=interval,
        tau=None if name == "plain" else interval,
        rows=1.0,
        drafted=2.0,
        identical=8,
    )


def test_the_plot_has_a_line_and_a_label_for_each_contestant_and_a_mark_for_each_size():
    points = [
        make_point("plain", 1, 1.0),
        *(make_point(name, size, 1.5, known=size > 1) for name in ("a & b", "c") for size in (4, 1, 2)),
    ]
    drawn = speedup_lines(points)
    assert {name: [size for size, _ in line] for name, line in drawn.items()} == {"a & b": [1, 2, 4], "c": [1, 2, 4]}
    svg = ElementTree.fromstring(standalone(speedup_by_size(drawn, "batch size")))
    space = "{http://www.w3.org/2000/svg}"
    words = [t.text for t in svg.iter(f"{space}text")]
    assert {"a & b", "c", "1", "2", "4", "batch size"} <= set(words)
    curves = list(svg.iter(f"{space}polyline"))
    assert [len((c.get("points") or "").split()) for c in curves] == [3, 3]
    spread = [line for line in svg.iter(f"{space}line") if (line.get("class") or "").startswith("spread")]
    assert len(spread) == 4  # none where there is no interval
    assert "1: 1.50×" in (svg.get("aria-label") or "")
    across = [float(p.split(",")[0]) for p in (curves[0].get("points") or "").split()]
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.2)  # sizes stand on a log scale
