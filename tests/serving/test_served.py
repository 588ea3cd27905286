"""`outrider served` against an engine: here our own decoder after a server of vLLM's interface (conftest)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from outrider.decode import Decoder, Plan
from outrider.distill.prompts import Prompt
from outrider.eval.suites import make_suite
from outrider.ground import BadInputError
from outrider.heads import Drafter, Eagle3, Eagle3Config
from outrider.heads.base import TargetBatch
from outrider.pair import Pair, new_pair, verify
from outrider.recipes import Recipe
from outrider.scripts.cli import app
from outrider.serving.engine import Engine, root_url
from outrider.serving.expectation import Expectation, Trial, expect, expect_mistakes
from outrider.serving.hypotheses import HYPOTHESES, mistaken
from outrider.serving.launching import Launch, python_of, running
from outrider.serving.result import ServedResult
from outrider.serving.served import Survey
from outrider.targets import Target

from .conftest import Server

TEXTS = ["def add(first, second):", "for name in sorted(names):\n", "The target verifies", "class Stack:\n    def"]
TRIAL = Trial(temperatures=(0.0,), depth=3, max_new_tokens=24)


@pytest.fixture
def head(tiny_target: Target) -> Eagle3:
    """A head that learned the target's own answers to the prompts by heart, for a second."""
    torch.manual_seed(3)
    made = Eagle3.build(Eagle3Config(steps=2, taps=(2, 4, 5), draft_vocab_size=0), tiny_target)
    prompts = [tiny_target.require_tokenizer()(text)["input_ids"] for text in TEXTS]
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
    return made.eval()


@pytest.fixture
def expected(tiny_target: Target, head: Drafter) -> Expectation:
    tokenizer = tiny_target.require_tokenizer()
    prompts = [Prompt(f"{i}", "a", tuple(tokenizer(text)["input_ids"]), text) for i, text in enumerate(TEXTS)]
    return expect(tiny_target, head, [make_suite("a", prompts)], TRIAL)


def ask(expected: Expectation, server: Server) -> ServedResult:
    survey = Survey(expected)
    survey.ask(Engine(server.url))
    return survey.result({"name": "vllm"}, str)


def test_an_engine_that_does_the_same_agrees(
    tiny_target: Target, head: Drafter, expected: Expectation, start_engine: Callable[..., Server]
) -> None:
    found = ask(expected, start_engine(tiny_target, head))
    assert found.agrees
    assert found.foreign == 0
    at_zero = found.at(0.0)
    assert (at_zero.identical, at_zero.same_drafts) == (4, 4)
    assert at_zero.difference.value == 0


def test_an_engine_with_a_mistake_is_found_and_the_mistake_is_named(
    tiny_target: Target, head: Eagle3, expected: Expectation, start_engine: Callable[..., Server]
) -> None:
    """The mistake that our own head does the same with is the explanation."""
    named = dict(mistaken(head))
    some = {name: named[name] for name in ("taps - 1", "norm_output", "gate and up")}
    known = expect_mistakes(tiny_target, some.items(), expected)
    result = ask(known, start_engine(tiny_target, named["taps - 1"]))
    assert not result.agrees
    assert [s.kind for s in result.suspicions] == ["first"]
    assert "taps that are one too low" in result.suspicions[0].suspect


def test_every_mistake_can_be_made_of_a_head_that_can_have_it(tiny_target: Target) -> None:
    pruned = Eagle3.build(
        Eagle3Config(steps=3, taps=(2, 4, 5), draft_vocab_size=100, norm_taps=True),
        tiny_target,
        torch.randperm(tiny_target.vocab_size),
    )
    made = dict(mistaken(pruned))
    assert made.keys() == HYPOTHESES.keys() - {"rope 10000"}, "its own base is no mistake"
    assert all(head.config.draft_vocab_size == 100 for head in made.values())


def test_traffic_of_others_is_counted_and_said(
    tiny_target: Target, head: Drafter, expected: Expectation, start_engine: Callable[..., Server]
) -> None:
    server = start_engine(tiny_target, head)
    page = server.metrics.page

    def busier() -> str:
        server.metrics.tokens += 3
        return page()

    server.metrics.page = busier  # type: ignore[method-assign]
    assert ask(expected, server).foreign > 0


def test_the_verb_compares_stores_and_says_it_in_json(
    tiny_target: Target,
    head: Drafter,
    start_engine: Callable[..., Server],
    tmp_path: Path,
    tiny_tokenizer: object,
) -> None:
    """What is stored leaves the pair intact, and a pair that was never served is written as before."""
    tiny_target.model.save_pretrained(str(tmp_path / "target"))
    tiny_target.require_tokenizer().save_pretrained(str(tmp_path / "target"))
    target = Target.load(str(tmp_path / "target"))
    suite = tmp_path / "a.jsonl"
    suite.write_text("".join(json.dumps({"id": str(i), "prompt": text}) + "\n" for i, text in enumerate(TEXTS)))
    recipe = Recipe.from_dict(
        {
            "name": "tiny",
            "target": {"path": str(tmp_path / "target")},
            "drafter": {"type": "eagle3"},
            "data": {"prompts": [str(suite)]},
            "eval": {"suites": [str(suite)], "depth": 3, "max_new_tokens": 16},
        }
    )
    pair = new_pair(tmp_path / "pair", target, head, recipe, calibration=[])
    assert "served" not in json.loads((pair.folder / "pair.json").read_text())
    server, plain = start_engine(target, head), start_engine(target, None)
    words = ["served", pair.folder, "--url", f"{server.url}/v1", "--plain-url", plain.url, "--max-new-tokens", 16]
    words += ["--temperature", 0, "--expect", tmp_path / "expected.json", "--json"]
    found = CliRunner().invoke(app, [str(w) for w in words])
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    assert (said.pop("schema"), said.pop("exit_code")) == ("outrider.served/1", 0)
    result = ServedResult.model_validate(said)
    assert result.agrees
    assert result.at(0.0).speedup is not None
    assert Expectation.load(tmp_path / "expected.json").drafter == "eagle3"
    stored = Pair.load(pair.folder)
    assert verify(pair.folder) == []
    assert [(r.engine, r.agrees, r.depth) for r in stored.manifest.served] == [("vllm", True, 3)]
    assert stored.digest == pair.digest


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'ImportError: no engine here'\nexit 3\n")
    python.chmod(0o755)
    launch = Launch(python_of(tmp_path), "target", "float32")
    with (
        pytest.raises(BadInputError, match=r"exit code 3(.|\n)*ImportError: no engine here"),
        running(launch, tmp_path / "log"),
    ):
        pass


def test_bad_words_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for words, said in (
        (["served", "x"], "either --url"),
        (["served", "x", "--start", "sglang"], "start it yourself"),
        (["served", "x", "--start", "vllm"], "--python"),
    ):
        found = CliRunner().invoke(app, words)
        assert (found.exit_code, said in found.output) == (2, True), found.output
    with pytest.raises(BadInputError, match="no Python"):
        python_of(tmp_path / "nothing")
    with pytest.raises(BadInputError, match="begins with http"):
        root_url("localhost:8000")
    assert root_url("http://x:1/v1/") == root_url("http://x:1/metrics") == "http://x:1"
