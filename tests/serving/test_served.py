"""`outrider served` against an engine: here our own decoder after a server of vLLM's interface (conftest)."""

from __future__ import annotations

import copy
import json
import math
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider.common import BadInputError
from outrider.common.plugins import plugin
from outrider.common.server_process import python_of
from outrider.common.signals import stoppable
from outrider.decode import Decoder, Plan, Round, Sampling
from outrider.distill.prompt_table import Prompt
from outrider.eval.suites import make_suite
from outrider.formats import import_drafter
from outrider.heads import DFlash, DFlashConfig, Drafter, DraftModel, Eagle3, Eagle3Config, Ngram, NgramConfig
from outrider.heads.base import TargetBatch
from outrider.lab.fault_explanation import mistaken
from outrider.pair import Pair, export_pair, new_pair, verify
from outrider.recipes import Recipe
from outrider.scripts.cli import app
from outrider.serving.diagnosis import ServedResult, lines
from outrider.serving.engine import Engine, root_url
from outrider.serving.engine_measurement import ServedSession, Start, Survey, depth_of
from outrider.serving.launching import VllmLaunch, running, split_speculation
from outrider.serving.reference_run import (
    HABITS,
    DraftCounts,
    Expectation,
    FirstPlace,
    ServedAnswer,
    ServedPrompt,
    Trial,
    WholeCopy,
    expect,
    expect_mistakes,
    margin_at,
    surprise,
)
from outrider.targets import RowLengths as Counted
from outrider.targets import Target

from ..closeness import assert_same
from ..forked import Forked
from .conftest import Server, answer
from .small_engine import TOKENS, completion

# The lab's, which may be missing.
HYPOTHESES, BLOCK_HYPOTHESES = (plugin("mistakes", name) or {} for name in ("eagle3", "dflash"))

TEXTS = ["def add(first, second):", "for name in sorted(names):\n", "The target verifies", "class Stack:\n    def"]
TRIAL = Trial(temperatures=(0.0,), depth=3, max_new_tokens=24)


def prompts_for(target: Target) -> list[Prompt]:
    tokenizer = target.require_tokenizer()
    return [Prompt(f"{i}", "a", tuple(tokenizer(text)["input_ids"]), text) for i, text in enumerate(TEXTS)]


@pytest.fixture
def head(tiny_target) -> Eagle3:
    """A head that learned the target's own answers to the prompts by heart, for a second."""
    torch.manual_seed(3)
    made = Eagle3.build(Eagle3Config(steps=2, taps=(2, 4, 5), draft_vocab_size=0), tiny_target)
    learn_by_heart(made, tiny_target)
    return made


def learn_by_heart(made: Drafter, tiny_target: Target) -> None:
    prompts = [prompt.tokens for prompt in prompts_for(tiny_target)]
    written = Decoder(tiny_target).generate(prompts, 24, plan=Plan(depth=0), ignore_eos=True).tokens
    rows = [torch.tensor([[*prompt, *answer]]) for prompt, answer in zip(prompts, written, strict=True)]
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    for step in range(80):
        tokens = rows[step % len(rows)]
        out = tiny_target.forward(tokens, taps=made.taps)
        batch = TargetBatch(tiny_target, tokens, torch.ones_like(tokens, dtype=torch.bool), out.hidden, out.last)
        made.loss(batch).mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    made.eval()


@pytest.fixture
def expected(tiny_target, head) -> Expectation:
    return expect(tiny_target, head, [make_suite("a", prompts_for(tiny_target))], TRIAL)


def ask(expected: Expectation, server: Server) -> ServedResult:
    survey = Survey(expected)
    survey.ask(Engine(server.url))
    return survey.result({"name": "vllm"}, str)


def test_an_engine_that_does_the_same_agrees(tiny_target, head, expected, start_engine):
    found = ask(expected, start_engine(tiny_target, head))
    assert found.agrees
    assert found.foreign == 0
    at_zero = found.at(0.0)
    assert (at_zero.identical, at_zero.same_drafts, at_zero.difference.value, at_zero.unsteady) == (4, 4, 0, False)


def test_an_engine_with_a_mistake_is_found_and_the_mistake_is_named(tiny_target, head, expected, start_engine):
    """The mistake that our own head does the same with is the explanation."""
    named = dict(mistaken(head))
    some = {name: named[name] for name in ("taps - 1", "norm_output", "gate and up")}
    known = expect_mistakes(tiny_target, some.items(), expected)
    result = ask(known, start_engine(tiny_target, named["taps - 1"]))
    assert not result.agrees
    assert [s.kind for s in result.suspicions] == ["first"]
    assert "taps that are one too low" in result.suspicions[0].suspect


@pytest.mark.parametrize("instead", [{"temperature": 0.8}, {"temperature": 1.0, "top_k": 5}])
def test_a_server_that_draws_where_temperature_0_was_asked_is_named(instead, tiny_target, head, expected, start_engine):
    """Neither the target nor its dtype, nor the drafts, is accused."""
    survey = Survey(expected)
    survey.ask(Engine(start_engine(tiny_target, head, **instead).url))
    (found,) = survey.result({"name": "vllm"}, str, target=tiny_target).suspicions
    assert (found.kind, "two texts" in found.because) == ("drawn", True)


def test_an_engine_that_norms_all_context_by_the_first_layer_is_explained(tiny_target, expected, start_engine):
    """As vLLM 0.32 does on a CPU with the keys of a DFlash drafter of several layers."""
    torch.manual_seed(0)
    config = DFlashConfig(num_layers=2, block_size=4, taps=(2, 4), mask_token_id=7)
    drafter = DFlash.build(config, tiny_target, torch.ones(tiny_target.vocab_size))
    torch.nn.init.uniform_(drafter.layers[0].self_attn.k_norm.weight, -3.0, 3.0)
    learn_by_heart(drafter, tiny_target)
    asked = [make_suite("a", [Prompt(p.id, "a", tuple(p.tokens), "") for p in expected.prompts])]
    named = dict(mistaken(drafter))
    assert named.keys() == BLOCK_HYPOTHESES.keys()
    known = expect_mistakes(tiny_target, named.items(), expect(tiny_target, drafter, asked, TRIAL))
    found = ask(known, start_engine(tiny_target, named["first k_norm"]))
    assert found.at(0.0).own.value > 1.5
    assert not found.agrees
    assert "k_norm" in found.suspicions[0].suspect
    assert "the same drafts in 4 of 4 prompts" in found.suspicions[0].suspect


def test_a_known_way_to_look_n_grams_up_is_no_finding_and_another_one_is(tiny_target, start_engine):
    """vLLM copies from the first place where the last tokens stood, ours from the latest: neither is wrong."""
    drafter, tokens = Ngram(NgramConfig(max_match=2, min_match=1)), [5, 6, 7, 5, 6, 8, 9, 5, 6, 7, 8, 5, 6]
    suites = [make_suite("a", [Prompt(f"{i}", "a", tuple(t + i for t in tokens), "") for i in range(8)])]
    trial = replace(TRIAL, max_new_tokens=40, habits="vllm")
    expected = expect(tiny_target, drafter, suites, trial)
    other = FirstPlace(drafter.config)
    session = other.open(tiny_target, 1, 64)
    session.update(torch.tensor([tokens[:-1]]), None, Counted.of([len(tokens) - 1], torch.device("cpu")))
    assert session.continuations([[6]], 4) == [[7, 5, 6, 8]]
    assert session.continuations([[8]], 9) == [[9, 5, 6, 7, 8, 5, 8]], "no further than the text goes"
    found = ask(expected, start_engine(tiny_target, other))
    assert (found.agrees, found.at(0.0).same_drafts) == (True, 8)
    known = expect_mistakes(tiny_target, mistaken(HABITS["vllm"].imitate(drafter)), expected)
    found = ask(known, start_engine(tiny_target, drafter))
    assert [s.kind for s in found.suspicions] == ["lookup"]
    assert "from the latest place" in found.suspicions[0].suspect
    assert "the same drafts in 8 of 8 prompts" in found.suspicions[0].suspect


def test_llama_cpp_copies_from_the_latest_place_and_only_what_is_long_enough(tiny_target):
    """By hand from its source: runs of one length, none at the very beginning, none as long as the whole text."""

    def copied(text: list[int], depth: int) -> list[int]:
        session = WholeCopy(NgramConfig(max_match=2, min_match=2)).open(tiny_target, 1, 64)
        session.update(torch.tensor([text[:-1]]), None, Counted.of([len(text) - 1], torch.device("cpu")))
        return session.continuations([text[-1:]], depth)[0]

    assert copied([9, 5, 6, 1, 2, 5, 6, 3, 4, 5, 6], 3) == [3, 4, 5], "the latest place"
    assert copied([9, 1, 2, 3, 5, 6, 4, 5, 6], 3) == [4, 5], "the last token is no part of what is copied"
    assert copied([9, 1, 2, 3, 5, 6, 5, 6], 2) == [], "one token is less than the match"
    assert copied([5, 6, 1, 2, 3, 4, 5, 6], 2) == [], "the beginning of the text counts as no place"
    assert copied([9, 5, 6, 1, 5, 6], 3) == [], "the text is too short"


def test_the_target_says_how_sure_it_is_and_how_probable_texts_are(tiny_target):
    """Draws at a temperature are as probable as its entropy says; draws at a lower one are more probable."""
    prompt = [5, 6, 7]
    (text,) = Decoder(tiny_target).generate([prompt], 4, plan=Plan(depth=0), ignore_eos=True).tokens
    logits = tiny_target.forward(torch.tensor([prompt + text])).logits[0]
    first, second = logits[4].topk(2).values.tolist()
    assert_same(margin_at(tiny_target, prompt, text, 2), first - second, scale=abs(first))

    def far(temperature: float) -> float:
        """Return how many standard deviations draws at a temperature are off."""
        drawn = Decoder(tiny_target).generate([prompt] * 4, 60, Sampling(temperature, seed=1)).tokens
        excess, variance = (
            sum(of) for of in zip(*(surprise(tiny_target, prompt, text, 1.0) for text in drawn), strict=True)
        )
        return excess / math.sqrt(variance)

    assert abs(far(1.0)) < 2.6
    assert far(0.3) < -3


def test_rounds_count_as_an_engine_counts_them_that_drafts_no_further_than_the_text_goes():
    """Of nine tokens after the first, the third round may draft one, and the last one none."""
    rounds = [Round(4, 2, 3), Round(4, 3, 4), Round(4, 4, 2)]
    whole, within = DraftCounts.of(rounds), DraftCounts.of(rounds, room=9)
    assert (whole.rounds, whole.drafted, whole.accepted) == (3, 12, 9)
    assert (within.rounds, within.drafted, within.accepted) == (3, 9, 6)
    assert within.by_position == (3, 2, 1, 0)
    assert DraftCounts.of([*rounds[:2], Round(4, 0, 1), Round(4, 0, 1)], room=9).rounds == 3


def share_accepted(expected: Expectation, temperature: float) -> float:
    counts = [c for a in expected.at(temperature) for c in a.counts]
    return sum(c.accepted for c in counts) / sum(c.drafted for c in counts)


def test_an_engines_habit_narrows_draft_models_above_temperature_0_and_goes_again(tiny_target):
    """llama.cpp draws of ten tokens: fewer drafts are accepted; at temperature 0 the first is the first of all."""
    drafter = DraftModel(copy.deepcopy(tiny_target.model))
    suites = [make_suite("a", prompts_for(tiny_target))]
    trial = Trial((0.0, 1.0), depth=3, max_new_tokens=24, seeds=2)
    own, llama, again = (expect(tiny_target, drafter, suites, replace(trial, habits=h)) for h in ("", "llama.cpp", ""))
    assert again == own
    assert share_accepted(own, 1.0) == 1, "a draft model that is the target is always right"
    assert share_accepted(llama, 1.0) < 0.95
    assert share_accepted(llama, 0.0) == 1
    assert [a.tokens for a in llama.at(0.0)] == [a.tokens for a in own.at(0.0)]


def test_every_mistake_can_be_made_of_a_head_that_can_have_it(tiny_target):
    pruned = Eagle3.build(
        Eagle3Config(steps=3, taps=(2, 4, 5), draft_vocab_size=100, norm_taps=True),
        tiny_target,
        torch.randperm(tiny_target.vocab_size),
    )
    made = dict(mistaken(pruned))
    others = {"rope 10000", "fc_norm 3", "fc_norm 4"}
    assert made.keys() == HYPOTHESES.keys() - others, "its own base is no mistake, and it has three taps"
    assert all(head.config.draft_vocab_size == 100 for head in made.values())


def test_traffic_of_others_is_counted_and_said(tiny_target, head, expected, start_engine):
    server = start_engine(tiny_target, head)
    page = server.metrics.page

    def busier() -> str:
        server.metrics.tokens += 3
        return page()

    server.metrics.page = busier  # type: ignore[method-assign]
    assert ask(expected, server).foreign > 0


def test_the_verb_compares_stores_and_says_it_in_json(stored, head, start_engine, tmp_path):
    """What is stored leaves the pair intact, and a pair that was never served is written as before."""
    pair, target = stored, stored.load_target()
    assert "served" not in json.loads((pair.folder / "pair.json").read_text())
    server, plain = start_engine(target, head), start_engine(target, None)
    words = ["served", pair.folder, "--url", f"{server.url}/v1", "--plain-url", plain.url, "--max-new-tokens", 16]
    words += ["--temperature", 0, "--expect", tmp_path / "expected.json", "--json"]
    found = CliRunner().invoke(app, [str(w) for w in words])
    assert found.exit_code == 0, found.output
    result = ServedResult.model_validate(answer("served", found.stdout))
    assert result.agrees
    assert result.at(0.0).speedup is not None
    assert Expectation.load(tmp_path / "expected.json").drafter == "eagle3"
    stored = Pair.load(pair.folder)
    assert verify(pair.folder) == []
    assert [(r.engine, r.agrees, r.depth) for r in stored.manifest.served] == [("vllm", True, 3)]
    assert stored.digest == pair.digest


@pytest.fixture
def stored(tiny_target, head, tmp_path) -> Pair:
    """A pair on the disk, with its own prompts."""
    tiny_target.model.save_pretrained(str(tmp_path / "target"))
    tiny_target.require_tokenizer().save_pretrained(str(tmp_path / "target"))
    suite = tmp_path / "a.jsonl"
    suite.write_text("".join(json.dumps({"id": str(i), "prompt": text}) + "\n" for i, text in enumerate(TEXTS)))
    values = {
        "name": "tiny",
        "target": {"path": str(tmp_path / "target")},
        "drafter": {"type": "eagle3"},
        "data": {"prompts": [str(suite)]},
        "eval": {"suites": [str(suite)], "depth": 3, "max_new_tokens": 16},
    }
    target = Target.load(str(tmp_path / "target"))
    return new_pair(tmp_path / "pair", target, head, Recipe.from_dict(values), calibration=[])


def test_an_expectation_of_something_else_is_refused(stored, tmp_path):
    """Other weights of the same drafter, another depth, fewer prompts: each is named."""
    trial = Trial(depth=3, max_new_tokens=8, limit=2, seeds=1)
    made = ServedSession(stored, trial).expected
    made.save(tmp_path / "expected.json")
    known = Expectation.load(tmp_path / "expected.json")
    assert ServedSession(stored, trial, (), known).expected == made
    for other, said in (
        (replace(trial, depth=2), "depth is 3 there and 2 here"),
        (replace(trial, limit=3), "limit is 2 there and 3 here"),
        (replace(trial, temperatures=(0.0,)), "temperatures"),
        (replace(trial, seeds=2), "seeds"),
        (replace(trial, first_seed=4), "first_seed is 0 there and 4 here"),
        (replace(trial, max_new_tokens=9), "max_new_tokens"),
    ):
        with pytest.raises(BadInputError, match=said):
            ServedSession(stored, other, (), known)
    with pytest.raises(BadInputError, match="suites"):
        ServedSession(stored, trial, ("code",), known)
    with pytest.raises(BadInputError, match="the drafter has other weights"):
        ServedSession(stored, trial, (), known.model_copy(update={"drafter_digest": "0" * 64}))


def test_the_seeds_of_our_own_answers_can_be_chosen(stored):
    """Two seeds from 1 on share one with two from 0 on; at temperature 0 all are the same."""
    trial = Trial(depth=3, max_new_tokens=8, limit=2, seeds=2)
    first, second = (ServedSession(stored, replace(trial, first_seed=s)).expected for s in (0, 1))
    assert first.at(0.0) == second.at(0.0)
    for one, other in zip(first.at(1.0), second.at(1.0), strict=True):
        assert one.counts[1] == other.counts[0]
        assert one.tokens != other.tokens


def test_a_target_that_lies_elsewhere_is_named(stored, tmp_path):
    moved = tmp_path / "moved"
    (tmp_path / "target").rename(moved)
    trial = Trial((0.0,), depth=3, max_new_tokens=8, limit=1)
    with pytest.raises(BadInputError):
        _ = ServedSession(stored, trial).expected
    assert ServedSession(stored, trial, target=str(moved)).expected.target == stored.fingerprint().digest


def test_an_export_is_expected_to_draft_as_deep_as_it_was_exported(stored, tmp_path):
    """Its depth may be the tuned one, which is not that of the pair's plan."""
    export = tmp_path / "export"
    export_pair(stored, "vllm", export, depth=2)
    assert depth_of(stored) == stored.plan.depth == 3
    assert depth_of(stored, export) == 2
    assert depth_of(stored, export, 2) == 2
    assert depth_of(stored, None, 5) == 5
    with pytest.raises(BadInputError, match="exported for 2 draft tokens"):
        depth_of(stored, export, 3)
    other = replace(stored, manifest=stored.manifest.model_copy(update={"digest": "0" * 64}))
    with pytest.raises(BadInputError, match="exported from another pair"):
        depth_of(other, export)


def test_of_a_quantised_export_the_rounded_drafter_is_expected(stored, tmp_path):
    """An engine's drafts are those of the weights in its files; an expectation of others is refused."""
    pytest.importorskip("compressed_tensors")
    export_pair(stored, "vllm", tmp_path / "export", precision="w4a16")
    trial = Trial((0.0,), depth=3, max_new_tokens=8, limit=1)
    session = ServedSession(stored, trial, export=tmp_path / "export")
    found, own = session.drafter(), ServedSession(stored, trial).drafter()
    read = import_drafter(tmp_path / "export", session.target)
    assert torch.equal(found.fc.weight, read.fc.weight)
    assert not torch.equal(found.fc.weight, own.fc.weight)
    assert session.expected.precision == "w4a16"
    with pytest.raises(BadInputError, match="precision is 'w4a16' there and '' here"):
        ServedSession(stored, trial, (), session.expected)


@pytest.fixture
def small_engine(tmp_path) -> VllmLaunch:
    """How a server is started that stands in for vLLM; its diary is in `tmp_path`."""
    server = Path(__file__).with_name("small_engine.py")
    launch = launch_of(tmp_path, f'exec {sys.executable} {server} {tmp_path}/diary "$@"')
    return replace(launch, speculation={"method": "eagle3"})


def launch_of(folder: Path, script: str) -> VllmLaunch:
    """Return how an engine is started whose Python is a script for the shell."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return VllmLaunch(python_of(folder), "target", "float32")


@pytest.mark.parametrize("in_turns", [True, False])
def test_engines_answer_in_turns_or_one_by_one(in_turns, small_engine, tmp_path):
    """One GPU holds one of them: the one with drafts ends before the plain one begins."""
    tokens, counts = [7, 8, 9, 10, 11, 12], DraftCounts(rounds=3, drafted=6, accepted=3, by_position=(3, 0))
    own = {"0": [ServedAnswer(tokens=tokens, ended=False, lengths=[6], counts=[counts])] * 3}  # as the small engine
    asked = [ServedPrompt(suite="code", id=str(i), tokens=[1, 2]) for i in range(3)]
    expected = Expectation(target="t", drafter="eagle3", depth=2, max_new_tokens=6, prompts=asked, answers=own)
    survey = Survey(expected)
    facts = survey.start(small_engine, replace(small_engine, speculation=None), tmp_path, in_turns)
    found = survey.result({"name": facts["name"]}, str)
    assert found.agrees
    assert found.at(0.0).speedup is not None
    diary = (tmp_path / "diary").read_text().splitlines()
    ends, begins = diary.index("drafting ends"), diary.index("plain begins")
    assert (begins < ends) == in_turns


def test_a_request_to_stop_ends_the_engine_too(small_engine, tmp_path):
    """It runs in a process session of its own, which a scheduler's signal does not reach."""

    def main() -> None:
        with stoppable(), running(replace(small_engine, speculation=None), tmp_path / "log"):
            (tmp_path / "answers").touch()
            time.sleep(60)

    waiting = Forked(main, tmp_path)
    until = time.monotonic() + 60
    while not (tmp_path / "answers").exists():
        assert waiting.poll() is None, waiting.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    waiting.send_signal(signal.SIGTERM)
    waiting.communicate(20)
    assert (tmp_path / "diary").read_text().splitlines()[-1] == "plain ends"


def test_a_session_starts_an_engine_and_tries_what_explains_it(stored, small_engine, tmp_path):
    """The target's memory is free while the engine runs, and the target is there again to try mistakes on."""
    session = ServedSession(stored, Trial((0.0,), depth=2, max_new_tokens=6, limit=2))
    for own in session.expected.at(0.0):
        own.tokens = TOKENS  # the small engine writes a text of its own
    found = session.start(Start(tmp_path, in_turns=False), 0.02)
    assert not found.agrees
    assert found.comparisons[0].candidates
    assert (found.engine["name"], found.engine["in_turns"]) == ("vllm", False)
    assert session.expected.mistakes
    assert (tmp_path / "diary").read_text().splitlines()[-1] == "plain ends"


def test_an_engine_that_counts_less_is_not_accused(tiny_target, head, expected, start_engine):
    """Text Generation Inference counts rounds and accepted drafts alone."""
    server = start_engine(tiny_target, head)

    def page() -> str:
        found = server.metrics
        return (
            f"tgi_request_skipped_tokens_count {found.counts.rounds}\n"
            f"tgi_request_skipped_tokens_sum {found.counts.accepted}\n"
            f"tgi_request_generated_tokens_sum {found.tokens}\n"
        )

    server.metrics.page = page  # type: ignore[method-assign]
    found = ask(expected, server)
    assert found.agrees
    assert found.at(0.0).difference.value == 0
    assert any("does not count" in line and "by position" in line for line in lines(found))


def test_llama_cpp_is_started_with_a_head_and_without(stored, tmp_path):
    """The verb writes target and head as GGUF, both servers read one target, and the plain one no head."""
    server = Path(__file__).with_name("small_engine.py")
    script = tmp_path / "llama-server"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/words\nexec {sys.executable} {server} {tmp_path}/diary "$@"\n'
    )
    script.chmod(0o755)
    words = ["served", stored.folder, "--start", "llama.cpp", "--program", script, "--depth", 2, "--limit", 1]
    words += ["--temperature", 0, "--max-new-tokens", 6, "--no-explain", "--dry-run", "--json", "--", "--threads", 1]
    found = CliRunner().invoke(app, list(map(str, words)))
    assert found.exit_code == 1, found.output  # the small engine writes a text of its own
    drafting, plain = ((tmp_path / "words").read_text()).splitlines()
    assert "--spec-type draft-eagle3 --spec-draft-n-max 2 " in drafting
    assert "/export/draft.gguf" in drafting
    assert "--spec-type" not in plain
    assert drafting.split()[:2] == plain.split()[:2] == ["--model", drafting.split()[1]]
    assert plain.endswith(" --threads 1")
    assert (tmp_path / "diary").read_text().splitlines()[-1] == "drafting ends"


def test_an_engine_that_always_picks_a_heads_drafts_is_compared_with_picked_ones(stored):
    """llama.cpp at temperature 1: our drafts are the most probable ones, too."""
    trial = Trial((1.0,), depth=2, max_new_tokens=6, limit=2, seeds=1)
    own, llama = (ServedSession(stored, replace(trial, habits=habits)).expected for habits in ("", "llama.cpp"))
    assert [a.tokens for a in llama.at(1.0)] == [a.tokens for a in own.one_hot["1"]]


SHAPES = [({"token_logprobs": [-0.5]}, (-0.5,)), ({"content": [{"id": 7, "logprob": 0.0}]}, ())]


@pytest.mark.parametrize(("said", "told"), SHAPES)
def test_log_probabilities_in_llama_cpps_shape_are_not_told(said, told, start_server):
    def complete(body: dict[str, Any]) -> dict[str, Any]:
        found = completion([7], "x", body["prompt"])
        found["choices"][0]["logprobs"] = said
        return found

    assert Engine(start_server(complete).url).complete([1], 1, log_probs=True).log_probs == told


def test_an_adapter_beside_its_base_is_started_as_exported_and_asked_by_name(stored, small_engine, tmp_path):
    """Where the export lies now, wherever it was made."""
    export = tmp_path / "export"
    export.mkdir()
    launched = {"settings": {"method": "eagle3"}, "adapter": {"name": "tiny", "path": "/elsewhere", "rank": 20}}
    (export / "launch.json").write_text(json.dumps(launched))
    session = ServedSession(stored, Trial((0.0,), depth=2, max_new_tokens=6, limit=1))
    launch = session.launch(Start(tmp_path, export), tmp_path)
    words = launch.command(1)
    assert launch.asked_as == "tiny"
    assert words[words.index("--max-lora-rank") + 1] == "32"
    assert json.loads(words[words.index("--lora-modules") + 1])["path"] == str(export / "adapter")
    assert small_engine.asked_as is None


ENDS = {
    "ImportError: no engine here": r"started\.\nThe(.|\n)*ImportError: no engine here",
    "IndexError: index 98 is out of bounds for dimension 0 with size 96": r"row 98 of 96\..*d2t must hold offsets",
}


@pytest.mark.parametrize(("said", "explained"), ENDS.items())
def test_an_engine_that_cannot_start_says_why(tmp_path, said, explained):
    launch = launch_of(tmp_path, f"echo '{said}'\nexit 3")
    with pytest.raises(BadInputError, match=rf"exit code 3(.|\n)*{explained}"), running(launch, tmp_path / "log"):
        pass


def test_bad_words_are_refused_before_anything_starts(tmp_path):
    for words, said in (
        (["served", "x"], "either --url"),
        (["served", "x", "--start", "sglang"], "start it yourself"),
        (["served", "x", "--start", "vllm"], "--python"),
        (["served", "x", "--start", "llama.cpp", "--program", "x"], "there is no program x"),
        (["served", "x", "--start", "vllm", "--python", str(tmp_path)], "there is no Python"),
        (["served", "x", "--start", "vllm", "--python", "x"], "there is no Python at x"),
        (["served", "x", "--start", "vllm", "--python", sys.executable, "--model", "lora"], "--model names"),
    ):
        found = CliRunner().invoke(app, words)
        assert (found.exit_code, said in found.output) == (2, True), found.output
    with pytest.raises(BadInputError, match="no Python"):
        python_of(tmp_path / "nothing")
    with pytest.raises(BadInputError, match="begins with http"):
        root_url("localhost:8000")
    assert root_url("http://x:1/v1/") == root_url("http://x:1/metrics") == "http://x:1"


def test_words_after_the_dashes_go_to_the_engine_and_settings_to_its_drafting():
    words = ["--seed", "3", "--speculative-config.draft_sample_method", "greedy", "--speculative-config.k=4"]
    assert split_speculation(words) == ({"draft_sample_method": "greedy", "k": 4}, ("--seed", "3"))
    with pytest.raises(BadInputError, match="has no value"):
        split_speculation(["--speculative-config.method"])
