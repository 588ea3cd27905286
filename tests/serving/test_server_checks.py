"""What a server says of itself: which of its models is asked, its version and depth, its tokenizer and template."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError
from outrider.distill.conversation import render
from outrider.distill.prompt_table import Prompt
from outrider.eval.suites import make_suite
from outrider.formats import oldest_version
from outrider.serving.engine import Engine
from outrider.serving.reference_run import Expectation, sent_texts
from outrider.serving.server_checks import check_server

BASE = {"id": "base", "root": "/models/base", "parent": None}
LORA = {"id": "lora", "root": "/models/lora", "parent": "base"}
ALIAS = BASE | {"id": "other-name"}


@pytest.mark.parametrize(
    ("listed", "asked", "model"),
    [
        ([BASE], None, "base"),
        ([BASE, ALIAS], None, "base"),
        ([BASE, LORA], "lora", "lora"),
        ([BASE, LORA], None, "several models; it has 'base', 'lora' .an adapter of 'base'.. Name .* with --model"),
        ([{"id": "a"}, {"id": "b"}], None, "several models"),
        ([BASE], "lora", "no model 'lora'; it has 'base'"),
    ],
)
def test_a_server_of_several_models_is_asked_by_name(listed, asked, model, start_server):
    """A LoRA module's base was measured in its place, and accused."""
    server = start_server()
    server.pages["/v1/models"] = {"object": "list", "data": listed}
    engine = Engine(server.url, name=asked)
    if " " in model:
        with pytest.raises(BadInputError, match=model):
            _ = engine.model
    else:
        assert engine.model == model


def expectation(tokenizer: PreTrainedTokenizerFast | None, chats: bool = False) -> Expectation:
    prompts = [Prompt(str(i), "a", (1,), text) for i, text in enumerate(("def add(first):", "for name in names:"))]
    if chats:
        messages = [{"role": "user", "content": "for name in names:"}]
        text = render(tokenizer, messages, "")
        tokens = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        prompts = [Prompt("0", "a", tokens, text, tuple(messages))]
    texts = list(sent_texts([make_suite("a", prompts)], tokenizer, None))
    return Expectation(target="t", drafter="eagle3", depth=3, max_new_tokens=8, prompts=[], texts=texts)


def one_word_less(tokenizer: PreTrainedTokenizerFast) -> None:
    """Take merges away, as another version of a tokenizer's files may."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"] = state["model"]["merges"][:-12]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))


def two_ids_exchanged(tokenizer: PreTrainedTokenizerFast) -> None:
    """Exchange the ids of two tokens that no prompt has."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))


def other_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = f"Be kind. {tokenizer.chat_template}"


CHANGES: dict[str, tuple[Callable[[PreTrainedTokenizerFast], None], list[str], list[str]]] = {
    "none": (lambda tokenizer: None, [], []),
    "merges": (one_word_less, ["tokenizer"], ["tokenizer"]),
    "ids": (two_ids_exchanged, ["tokenizer"], ["tokenizer"]),
    "template": (other_template, ["template"], ["template"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_tokenizer_or_template_is_found_though_prompts_go_as_ids(change, tiny_tokenizer, start_server):
    server, (alter, of_texts, of_chats) = start_server(), CHANGES[change]
    server.tokenizer = copy.deepcopy(tiny_tokenizer)
    alter(server.tokenizer)
    for chats, kinds in ((False, of_texts), (True, of_chats)):
        facts, found = check_server(Engine(server.url), expectation(tiny_tokenizer, chats), {})
        assert [s.kind for s in found] == kinds
        assert "unchecked" not in facts
    assert all(str(s).startswith("the server makes") for s in found)
    assert len(server.posted) <= 5, "one request a suite, one of the vocabulary, and one chat, of both expectations"


def test_a_server_that_does_not_tell_its_tokens_is_not_accused(tiny_tokenizer, start_server):
    server = start_server()
    facts, found = check_server(Engine(server.url), expectation(tiny_tokenizer), {})
    assert (found, "from /tokenize" in facts["unchecked"]) == ([], True)
    facts, found = check_server(Engine(server.url), expectation(None), {})
    assert (found, "no text" in facts["unchecked"]) == ([], True)


NORMED = {"norm_taps": True, "norm_output": True, "taps": [2, 6, 9]}


@pytest.mark.parametrize(
    ("settings", "said", "kinds"),
    [
        (("eagle3", NORMED), {"version": "0.5.11"}, ["version"]),
        (("eagle3", NORMED), {"version": "0.5.12.post1"}, []),
        (("eagle3", NORMED | {"norm_taps": False, "norm_output": False}), {"version": "0.5.9"}, []),
        (("eagle3", NORMED), {"version": "0.0.0.dev1+g1234"}, []),
        (("eagle3", NORMED), {"version": "newest"}, []),
        (("dflash", {"causal": False}), {"version": "0.5.10"}, ["version"]),
        (("dflash", {"causal": True}), {"version": "0.5.16"}, ["version"]),
        (("dspark", {}), {"version": "0.5.16"}, []),
        (("eagle3", NORMED), {"version": "0.5.23", "speculative_num_draft_tokens": 4}, []),
        (("eagle3", NORMED), {"version": "0.5.23", "speculative_num_draft_tokens": 3}, ["depth"]),
        (("eagle3", NORMED), {}, []),
    ],
)
@pytest.mark.parametrize("page", ["/server_info", "/get_server_info"])
def test_what_sglang_says_of_itself(page, settings, said, kinds, start_server):
    server = start_server()
    server.metrics.page = lambda: "sglang:generation_tokens 5\nsglang:spec_accept_length 1.5\n"  # type: ignore[method-assign]
    server.pages |= {"/server_info": [], page: said}
    oldest = {"sglang": needed} if (needed := oldest_version("sglang", *settings)) else {}
    facts, found = check_server(Engine(server.url), expectation(None), oldest)
    assert [s.kind for s in found] == kinds
    assert facts.get("version") == said.get("version")
