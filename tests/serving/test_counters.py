"""Every engine's page of metrics says the same after it was read, whatever the names on it.

The pages hold the names of the engines' own sources; that of vLLM was taken from a running server.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.common import BadInputError
from outrider.serving.engine import Counters, read_counters

PAGES = Path(__file__).parent / "pages"


def page(name: str) -> str:
    return (PAGES / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", ["vllm", "vllm-0.8", "tgi", "llama-cpp"])
def test_each_engine_counts_200_rounds_that_kept_300_drafts(name):
    found = read_counters(page(name))
    assert (found.rounds, found.accepted, found.tau) == (200, 300, 2.5)


@pytest.mark.parametrize("name", ["vllm", "llama-cpp"])
def test_positions_are_summed_over_the_engines_of_a_server(name):
    found = read_counters(page(name))
    assert found.by_position == (130, 100, 50, 20)
    assert sum(found.by_position) == found.accepted
    assert found.drafted / found.rounds == 4


def test_an_average_alone_becomes_rounds_of_that_many_tokens():
    """SGLang shows the mean of its latest rounds, and counts tokens."""
    found = read_counters(page("sglang")).since(None)
    assert (found.rounds, found.accepted, found.tau) == (200, 300, 2.5)


@pytest.mark.parametrize("name", ["vllm", "sglang", "tgi", "llama-cpp"])
def test_names_may_have_lost_their_colons(name):
    """Exporters between engine and reader write `_` for `:`."""
    text = page(name)
    changed = text.replace("vllm:", "vllm_").replace("sglang:", "sglang_").replace("llamacpp:", "llamacpp_")
    assert read_counters(changed) == read_counters(text)


def test_what_was_counted_between_two_looks():
    first = Counters(10, 40, 15, (8, 5, 2), "vllm", 30, started=1.0)
    then = Counters(30, 120, 45, (22, 15, 6, 2), "vllm", 80, started=1.0)
    assert then.since(first) == Counters(20, 80, 30, (14, 10, 4, 2), "vllm", 50, started=1.0)
    assert then.since(first).tau == 2.5


def test_after_a_restart_everything_counted_is_new():
    before = Counters(100, 400, 150, (80, 50, 20), "vllm", 300, started=1.0)
    fallen = Counters(30, 120, 45, (22, 15, 8), "vllm", 80)
    assert fallen.restarted(before)
    assert fallen.since(before) == fallen
    busier = Counters(130, 520, 195, (100, 65, 30), "vllm", 380, started=2.0)
    assert busier.restarted(before), "it has counted more than before, but began later"
    assert busier.since(before).rounds == 130


def test_a_page_of_something_else_is_refused_with_what_to_do():
    with pytest.raises(BadInputError, match="--enable-metrics"):
        read_counters("# TYPE up gauge\nup 1\n")
    with pytest.raises(BadInputError, match="no page of Prometheus metrics"):
        read_counters("<html>{not metrics</html>")
