"""Which prompts a pair is measured on, under which settings, and what is counted."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from outrider.common import BadInputError
from outrider.decode import Decoder, Plan, Sampling
from outrider.distill.prompt_table import Prompt
from outrider.eval.suites import Suite, make_suite
from outrider.heads import TargetBatch
from outrider.pair import calibration
from outrider.pair.calibration import (
    calibrate,
    choose_prompts,
    read_calibration,
    rendered,
    settings,
    write_calibration,
)
from outrider.targets import Target

from ..closeness import assert_same
from ..eval.conftest import refusal
from .conftest import measured_at

SIX_DECIMALS = 1e-6  # are written


@pytest.mark.parametrize(("temperatures", "expected"), [([0.7, 0.0], 0.0), ([0.7, 1.0], 0.7)])
def test_a_calibration_is_greedy_where_the_recipe_is_and_short(recipe, temperatures, expected):
    found = settings(measured_at(recipe, temperatures=temperatures, max_new_tokens=500, seed=3))
    assert (found.temperature, found.max_new_tokens, found.seed, found.prompts) == (expected, 64, 3, [])
    assert settings(measured_at(recipe, max_new_tokens=7)).max_new_tokens == 7
    assert found.sampling() == Sampling(temperature=expected, seed=3)


def test_each_suite_gives_its_share_of_prompts_that_leave_room(recipe, make_target, monkeypatch):
    """32 prompts over three suites are 11 of each; the context of 512 must hold the prompt and 16 new tokens."""
    target, asked = make_target(), []
    lengths = {"one": [3, 496, 497], "two": [5], "three": [500, 100_000]}

    def suites(wanted: object, tokenizer: object, limit: int, template: object, images: None) -> list[Suite]:
        asked.append((wanted, tokenizer, limit, template))
        return [
            make_suite(name, [Prompt(f"{name}/{n}", "test", (1,) * n) for n in counts])
            for name, counts in lengths.items()
        ]

    monkeypatch.setattr(calibration, "load_suites", suites)
    three = measured_at(recipe, suites=["one", "two", "three"])
    chosen = [(p.id, p.suite) for p in choose_prompts(three, target)]
    assert chosen == [("one/3", "one"), ("one/496", "one"), ("two/5", "two")]
    choose_prompts(three, target, 7)
    names = ["one", "two", "three"]
    assert asked == [(names, target.tokenizer, 11, {}), (names, target.tokenizer, 3, {})]
    monkeypatch.setattr(Target, "max_context", property(lambda self: None))
    assert len(choose_prompts(three, target)) == 6, "a context without an end has room for any prompt"


def test_prompts_of_messages_are_asked_as_the_targets_template_asks_them(make_target, prompts):
    target = make_target()
    chat = dataclasses.replace(prompts[0], messages=({"role": "user", "content": "Why?"},), text="old", tokens=(1,))
    plain, asked = rendered([prompts[1], chat], target, {})
    assert plain is prompts[1]
    assert asked.text == "<|user|>Why?<|end|><|assistant|>"
    assert asked.tokens == tuple(target.tokenizer(asked.text, add_special_tokens=False)["input_ids"])
    assert (asked.id, asked.suite, asked.messages) == (chat.id, chat.suite, chat.messages)
    beginning = copy.deepcopy(target.tokenizer)
    processor = TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", 0)])
    beginning.backend_tokenizer.post_processor = processor
    assert beginning("Why?")["input_ids"][0] == 0
    (again,) = rendered([chat], Target(target.model, beginning), {})
    assert again.tokens == asked.tokens, "a template writes its own first token"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_without_a_loss_is_counted(make_target, make_drafter, recipe, prompts, temperature):
    """By rounds of a decoder that gives each prompt the number it has among all of them."""
    target = make_target()
    drafter = make_drafter("ngram", target)
    under = settings(measured_at(recipe, temperatures=[temperature], seed=5, max_new_tokens=60))
    found = calibrate(target, drafter, prompts, under, Plan(3))
    tokens, sampling = [p.tokens for p in prompts], Sampling(temperature, seed=5)
    output = Decoder(target, drafter).generate(tokens, 60, sampling, Plan(3), sequence_ids=range(len(prompts)))
    assert [(m.id, m.suite) for m in found] == [(p.id, p.suite) for p in prompts]
    for measure, rounds in zip(found, output.rounds, strict=True):
        assert (measure.accepted, measure.rounds) == (sum(r.emitted - 1 for r in rounds), len(rounds))
        kept = sum(r.accepted > 0 for r in rounds)
        assert (measure.alpha, measure.top1, measure.positions) == (kept, kept, sum(r.drafted > 0 for r in rounds))
        assert (measure.analytic_tau, measure.chains) == (len(rounds) + measure.accepted, len(rounds))
    assert any(m.positions < m.rounds for m in found), "some rounds draft nothing"
    assert any(m.accepted > m.alpha for m in found) or temperature, "some rounds keep more than one draft"


def test_a_trained_drafter_is_judged_by_its_own_loss_on_each_response(make_target, make_drafter, recipe, prompts):
    target = make_target()
    drafter = make_drafter("eagle3", target)
    found = calibrate(target, drafter, prompts, settings(recipe), Plan(3))
    output = Decoder(target).generate([p.tokens for p in prompts], 16)
    for measure, prompt, response in zip(found, prompts, output.tokens, strict=True):
        tokens = torch.tensor([[*prompt.tokens, *response]])
        out = target.forward(tokens, taps=drafter.taps, logits=False)
        supervised = torch.tensor([[False] * len(prompt.tokens) + [True] * len(response)])
        with torch.no_grad():
            metrics = drafter.loss(TargetBatch(target, tokens, supervised, out.hidden, out.last)).metrics
        assert_same(measure.alpha, metrics["alpha_d1"][0], apart=SIX_DECIMALS)
        assert measure.alpha == round(measure.alpha, 6), "written with six decimals"
        assert [measure.top1, measure.positions] == [part.item() for part in metrics["top1_d1"]]
        tau = [part.item() for part in metrics["tau"]]
        assert_same([measure.analytic_tau, measure.chains], tau, apart=SIX_DECIMALS)


def test_prompts_are_measured_some_at_a_time_with_the_same_figures(
    make_target, make_drafter, recipe, prompts, monkeypatch
):
    steps: list[int] = []

    @contextmanager
    def noted(console: object, description: str, total: int, **_: bool) -> Iterator[Callable[[int, str], None]]:
        assert (description, total) == ("calibration prompts", 5)
        yield lambda count, note: steps.append(count)

    monkeypatch.setattr(calibration, "progress", noted)
    target = make_target()
    drafter, under = make_drafter("ngram", target), settings(measured_at(recipe, temperatures=[1.0]))
    at_once = calibrate(target, drafter, prompts[:5], under, Plan(3))
    assert steps == [5]
    steps.clear()
    monkeypatch.setattr(calibration, "_AT_ONCE", 2)
    assert calibrate(target, drafter, prompts[:5], under, Plan(3)) == at_once
    assert steps == [2, 2, 1]


def test_nothing_to_measure_on_is_refused(make_target, make_drafter, recipe):
    target = make_target()
    with pytest.raises(BadInputError, match=r"^there are no calibration prompts to measure on\."):
        calibrate(target, make_drafter("ngram", target), [], settings(recipe), Plan(3))


def test_prompts_are_written_one_a_line_as_people_read_them(prompts, tmp_path):
    chat = dataclasses.replace(prompts[0], text="schön", messages=({"role": "user", "content": "schön"},))
    tools = dataclasses.replace(chat, tools=[{"name": "ls"}])
    write_calibration(tmp_path / "c.jsonl", [chat, prompts[1]])
    text = (tmp_path / "c.jsonl").read_text(encoding="utf-8")
    assert text.count("\n") == 2
    assert text.endswith("\n")
    assert "schön" in text
    assert read_calibration(tmp_path / "c.jsonl") == [chat, prompts[1]]
    assert "tools" not in text, "older versions refuse what they do not know"
    write_calibration(tmp_path / "c.jsonl", [tools])
    assert read_calibration(tmp_path / "c.jsonl") == [tools]


@pytest.mark.parametrize(
    "text",
    ["{", "[]\n", '{"id": "a"}\n', '{"id": "a", "suite": "s", "tokens": 3, "text": "t", "messages": null}\n', None],
)
def test_damaged_prompts_are_named_with_their_file(tmp_path, text):
    file = tmp_path / "calibration.jsonl"
    if text is not None:
        file.write_text(text)
    end = r"\(.+\)\. Run `outrider pair verify` and take a good copy of the pair\."
    assert re.search(rf"calibration\.jsonl: damaged {end}", refusal(read_calibration, file))
