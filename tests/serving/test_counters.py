"""Every engine's page of metrics says the same after it was read, whatever the names on it.

The pages hold the names of the engines' own sources; that of vLLM was taken from a running server.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.common import BadInputError
from outrider.serving.engine import Engine
from outrider.serving.engine_metrics import Counters, read_counters

PAGES = Path(__file__).parent / "pages"


def page(name: str) -> str:
    return (PAGES / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", ["vllm", "vllm-0.8", "tgi", "llama-cpp"])
def test_each_engine_counts_200_rounds_that_kept_300_drafts(name):
    found = read_counters(page(name)).since(None)
    assert (found.rounds, found.accepted, found.tau) == (200, 300, 2.5)


@pytest.mark.parametrize("name", ["vllm", "llama-cpp"])
def test_positions_are_summed_over_the_engines_of_a_server(name):
    found = read_counters(page(name)).since(None)
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


def written(rows: dict[str, tuple[int, int]], more: str = "") -> str:
    """Return a vLLM's page on which each label set has so many rounds of four drafts, and so many accepted drafts."""
    name, lines = "vllm:spec_decode_num", [more]
    for labels, (rounds, accepted) in rows.items():
        counts = {f"{name}_drafts": rounds, f"{name}_draft_tokens": 4 * rounds, f"{name}_accepted_tokens": accepted}
        counts["vllm:generation_tokens"] = rounds + accepted
        lines += [f"{counter}_total{{{labels}}} {count}.0" for counter, count in counts.items()]
    return "\n".join(lines) + "\n"


A, B = 'engine="0",model_name="m"', 'engine="1",model_name="m"'
OTHER = 'engine="0",model_name="other"'
MILLION = (1_000_000, 1_000_000)
# Looks at a page: rows of each look, and the rounds and accepted drafts since the first one, by hand.
LOOKS: dict[str, tuple[list[dict[str, tuple[int, int]]], tuple[int, int]]] = {
    "one of two restarts": ([{A: MILLION, B: MILLION}, {A: (1_001_000, 1_002_000), B: (50, 100)}], (1050, 2100)),
    "both restart": ([{A: MILLION, B: MILLION}, {A: (10, 30), B: (50, 100)}], (60, 130)),
    "neither restarts": ([{A: (5, 5), B: (7, 7)}, {A: (6, 8), B: (9, 9)}], (3, 5)),
    "one appears": ([{A: (100, 200)}, {A: (110, 230), B: (40, 80)}], (50, 110)),
    "one goes": ([{A: (100, 200), B: MILLION}, {A: (110, 230)}], (10, 30)),
    "one goes and comes back lower": (
        [{A: (100, 200), B: MILLION}, {A: (110, 230)}, {A: (120, 250), B: (30, 60)}],
        (50, 110),
    ),
    "one goes and comes back higher": (
        [{A: (100, 200), B: (500, 500)}, {A: (110, 230)}, {A: (120, 250), B: (503, 509)}],
        (23, 59),
    ),
    "all go and come back": ([{A: (100, 200)}, {OTHER: (9, 9)}, {A: (104, 212), OTHER: (10, 11)}], (14, 23)),
    "models": ([{A: (100, 200), OTHER: MILLION}, {A: (101, 203), OTHER: (3, 0)}], (4, 3)),
    "one restarts twice": ([{A: (9, 9), B: (900, 0)}, {A: (9, 9), B: (5, 5)}, {A: (10, 10), B: (4, 4)}], (10, 10)),
    "ranks": (
        [{f'dp_rank="{i}"': (100 * i, 100 * i) for i in range(8)}, {f'dp_rank="{i}"': (250, 250) for i in range(8)}],
        # ranks 0, 1 and 2 went on (250, 150, 50), 3 to 7 fell (250 each)
        (1700, 1700),
    ),
    "a label set that looks like two": ([{'a="1,b=2"': (5, 5), 'a="1",b="2"': (50, 0)}] * 2, (0, 0)),
    "only accepted drafts fell": ([{A: (100, 300)}, {A: (110, 40)}], (110, 40)),
}


@pytest.mark.parametrize("name", LOOKS)
def test_each_label_set_is_differenced_before_they_are_added(name):
    looks, expected = LOOKS[name]
    seen = read_counters(written(looks[0]))
    rounds = 0.0
    accepted = 0.0
    for rows in looks[1:]:
        now = read_counters(written(rows))
        new = now.since(seen)
        rounds = rounds + new.rounds
        accepted = accepted + new.accepted
        seen = now.after(seen)
    assert (rounds, accepted) == expected


def test_a_counter_that_has_passed_its_earlier_value_restarted_only_where_a_page_tells_when_it_began():
    """Nothing else on a page separates 100 rounds and 20 more from 0 rounds and 120 more."""
    before, after = {A: (100, 100), B: (7, 7)}, {A: (120, 120), B: (9, 9)}
    created = "vllm:generation_tokens_created"
    began = [f"{created}{{{A}}} {a}\n{created}{{{B}}} 5.0\n" for a in ("5.0", "6.5")]
    process = [f'process_start_time_seconds{{instance="{i}"}} 1.0\n' for i in "xy"]
    untold = read_counters(written(after)).since(read_counters(written(before)))
    told = read_counters(written(after, began[1])).since(read_counters(written(before, began[0])))
    assert (untold.rounds, told.rounds) == (22, 122)
    several = read_counters(written(after, process[0] + process[1].replace("1.0", "2.0")))
    assert several.since(read_counters(written(before, "".join(process)))).rounds == 22, "whose process is not said"


def test_an_engines_own_process_tells_that_it_restarted_and_not_that_another_did():
    """A page may be put together from those of several processes, each with its `instance`."""
    began = [
        f'process_start_time_seconds{{instance="x"}} 1\nprocess_start_time_seconds{{instance="y"}} {y}' for y in "23"
    ]
    x, y = 'instance="x"', 'instance="y"'
    before = read_counters(written({x: (100, 100), y: (100, 100)}, began[0]))
    now = read_counters(written({x: (110, 110), y: (150, 150)}, began[1]))
    assert now.restarted(before) == [y]
    assert now.since(before).rounds == 10 + 150


def test_each_models_own_mean_makes_its_rounds():
    """900 tokens of three a round and 100 of one a round: 400 rounds, where a mean of means would say 500."""
    lines = [f'sglang:generation_tokens_total{{model_name="{m}"}} {n}' for m, n in (("a", 900), ("b", 100))]
    lines += [f'sglang:spec_accept_length{{model_name="{m}",tp_rank="0"}} {n}' for m, n in (("a", 3), ("b", 1))]
    found = read_counters("\n".join(lines) + "\n")
    assert (found.since(None).rounds, found.of_model("a").since(None).rounds) == (400, 300)


def test_a_measurement_reads_its_own_model_and_ends_when_the_engine_is_started_anew(start_server):
    server, other = start_server(), 'model_name="n"'
    own = 'model_name="m"'
    server.metrics.page = lambda: written({own: (100, 100), other: (7, 7)})
    before, adapter = Engine(server.url, name="m").counters(), Engine(server.url, name="adapter").counters()
    assert (before.since(None).rounds, adapter.since(None).rounds) == (100, 107), "an adapter counts for its model"
    server.metrics.page = lambda: written({own: (103, 109), other: (1, 1)})
    assert Engine(server.url, name="m").settled(before, 12).since(before).tokens == 12
    server.metrics.page = lambda: written({own: (3, 9), other: (8, 8)})
    with pytest.raises(BadInputError, match="started anew in the middle of the measurement"):
        Engine(server.url, name="m").settled(before, 12)


def test_a_page_of_too_many_engines_or_of_several_kinds_is_refused():
    with pytest.raises(BadInputError, match="of 300 engines, expected at most 256"):
        read_counters(written({f'engine="{i}"': (1, 1) for i in range(300)}))
    with pytest.raises(BadInputError, match="several kinds of engines"):
        read_counters(page("vllm") + page("llama-cpp"))


def test_a_page_of_something_else_is_refused_with_what_to_do():
    with pytest.raises(BadInputError, match="--enable-metrics"):
        read_counters("# TYPE up gauge\nup 1\n")
    with pytest.raises(BadInputError, match="no page of Prometheus metrics"):
        read_counters("<html>{not metrics</html>")
