"""The lab's verbs answer programs as their schemas say."""

from __future__ import annotations

from pathlib import Path

from outrider.eval import Report
from outrider.eval.reports.render import write_report
from outrider.lab.json_bodies import BODIES
from outrider.pair import Pair

from ..scripts.conftest import Command, answer, succeeded


def test_the_answers_about_a_tuned_pair(outrider: Command, recipe_file: Path, tmp_path: Path) -> None:
    taps = "drafter.taps=[1,3,5]"
    run = tmp_path / "run"
    pair = tmp_path / "pair"
    for verb in (("train",), ("eval",), ("pair", "new", pair)):
        succeeded(outrider(*verb, recipe_file, taps))
    succeeded(outrider("tune", pair, "--limit", 2, "--batch", 1, "--batch", 2, "--max-new-tokens", 4))
    load = answer("capacity", outrider("lab", "capacity", pair, "--arrivals", 2, "--requests", 20, "--json"))
    assert [one["policy"] for one in load["loads"]] == ["plain", "fixed", "controlled"]
    again = answer("replay", outrider("lab", "replay", pair, "--limit", 2, "--json"))
    assert 1 <= again["tau"][1]["value"] <= 1 + len(again["rates"])
    engine = answer("replay", outrider("lab", "replay", pair, "--to", "vllm", "--json"))
    assert str(again["rates"]) in engine["command"]
    reordered = Report.load(run / "report")
    reordered.contestants.sort(key=lambda c: c.drafter != "ngram")  # as a fusion stands first that was tuned
    other = ["--report", write_report(reordered, tmp_path / "reordered"), "--to", "vllm"]
    assert answer("replay", outrider("lab", "replay", pair, *other, "--json"))["contestant"] == again["contestant"]
    searched = ["--candidates", 2, "--budget", 0.2, "--out", tmp_path / "searched", "eval.limit=1", "--json"]
    answer("search", outrider("lab", "search", recipe_file, taps, *searched))
    answer("vocab", outrider("lab", "vocab", recipe_file, taps, "--json"))
    few = ["--rank", 4, "--candidates", 8, "--prompts", 4, "--limit", 1, "--json"]
    among = answer("candidates", outrider("lab", "candidates", pair, "--out", tmp_path / "among", *few))
    assert 0 < among["argmax"] <= 1
    assert 0 < among["mass"] < 1
    named = (recipe_file, taps, "--drafter", tmp_path / "among")
    succeeded(outrider("eval", *named, "--limit", 1))
    succeeded(outrider("pair", "new", tmp_path / "pair-among", *named))
    succeeded(outrider("pair", "verify", tmp_path / "pair-among"))
    assert Pair.load(tmp_path / "pair-among").open()[1].name == "candidates"


def test_every_answer_is_shown_by_a_test() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("test_*.py")))
    assert [kind for kind in BODIES if f'answer("{kind}"' not in source] == []
