"""The support matrix says what the code does, and claims of real engines nothing that no result file holds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from outrider.formats import LAYOUTS
from outrider.formats.support import ENGINES, QUANTISED, REASONS, SERVED, support, table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "support.md"
BEGIN, END = "<!-- the matrix, written by tests/formats/test_support.py -->\n", "<!-- end of the matrix -->"


def test_the_page_is_what_the_code_says():
    """With OUTRIDER_WRITE_TABLES=1 in the environment the matrix is written anew."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    if os.environ.get("OUTRIDER_WRITE_TABLES"):
        PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1], encoding="utf-8")
    else:
        assert rest.split(END)[0] == table()


@pytest.mark.parametrize("claim", SERVED, ids="-".join)
def test_what_is_called_served_has_a_result_file(claim):
    engine, kind = claim
    assert kind in LAYOUTS[engine]
    said = SERVED[claim]
    found = json.loads((ROOT / "benchmarks" / "results" / f"{said.file}.json").read_text(encoding="utf-8"))
    conditions, greedy = found["conditions"], found["served"][said.row][0]
    assert conditions["engine"].lower().startswith(ENGINES[engine].lower())
    assert (conditions["created"], greedy["temperature"]) == (said.date, 0.0)
    assert ("mended" in said.build) is conditions.get("mended", False), "a build with its faults put right is no other"
    assert greedy["identical"] == conditions["prompts"], "its text is the target's"
    there, here = (round(greedy[side]["value"], 3) for side in ("served", "own"))
    assert (there, here) == (said.there, said.here)


@pytest.mark.parametrize("claim", QUANTISED, ids="-".join)
def test_what_is_called_served_in_a_precision_has_a_result_file(claim):
    """Its texts are the target's but for near ties of bfloat16, and its drafts those of the rounded drafter."""
    engine, kind, precision = claim
    assert precision in LAYOUTS[engine][kind].precisions
    said = QUANTISED[claim]
    found = json.loads((ROOT / "benchmarks" / "results" / f"{said.file}.json").read_text(encoding="utf-8"))
    conditions, greedy = found["conditions"], found["served"][said.row][0]
    assert (conditions["created"], conditions["dtype"], greedy["temperature"]) == (said.date, "bfloat16", 0.0)
    assert greedy["suspicions"] == []
    assert greedy["identical"] + len(greedy["near_ties"]) == greedy["prompts"]
    assert (round(greedy["served"]["value"], 3), round(greedy["own"]["value"], 3)) == (said.there, said.here)
    assert greedy["difference"]["low"] <= 0 <= greedy["difference"]["high"]


def test_every_drafter_that_can_leave_stands_in_the_matrix():
    known = {(one.drafter, one.engine): one for one in support()}
    for to, layouts in LAYOUTS.items():
        for kind in layouts:
            assert {(kind, engine) for engine in ENGINES} <= known.keys()
            if to in ENGINES:
                assert known[kind, to].level != "no"
    assert not [place for place in REASONS if place[1] in LAYOUTS[place[0]]], "a reason for what is written"
