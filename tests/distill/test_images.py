"""Rows with images: read, answered, masked, and read back with their images."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.common import BadInputError
from outrider.decode import Decoder, Plan
from outrider.distill import distill, load_responses
from outrider.distill.conversation import given_sequences, next_question
from outrider.distill.data_set import images_of
from outrider.distill.dataset_formats import RowError
from outrider.distill.prompt_table import Prompt, PromptTable
from outrider.distill.recipe_prompts import PromptReading, SuitePrompts, collect
from outrider.recipes import Recipe
from outrider.targets import Target

from ..closeness import assert_same
from .conftest import assistant, data_recipe, user, write_rows

pytest.importorskip("PIL")
from ..targets.image_models import FAMILIES, data_url, png, target_for


@cache
def target(family: str) -> Target:
    return target_for(family)


def picture(place: str) -> dict[str, Any]:
    return {"type": "image", "image": place}


def said(*parts: Any) -> dict[str, Any]:
    return user([{"type": "text", "text": part} if isinstance(part, str) else part for part in parts])  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two images in it."""
    for seed in range(2):
        (tmp_path / f"{seed}.png").write_bytes(png(seed=seed, width=120 + 60 * seed))
    return tmp_path


def prompts_of(folder: Path, rows: list[dict[str, Any]], family: str = "qwen2_5_vl", **reading: Any) -> list[Prompt]:
    file, own = write_rows(folder / "rows.jsonl", rows), target(family)
    reading = {"whole": True, "images": own.images} | reading
    return list(collect([file], own.require_tokenizer(), reading=PromptReading(**reading)).prompts)


def placeholders(tokens: Any, family: str = "qwen2_5_vl") -> int:
    return list(tokens).count(target(family).image_token)


def test_all_ways_to_name_an_image_ask_the_same(folder: Path) -> None:
    inline = data_url(png(seed=0))
    parts = [
        picture("0.png"),
        {"type": "image", "path": "0.png", "text": None, "image_url": None},  # as a table has it
        {"type": "image", "url": inline},
        {"type": "image_url", "image_url": {"url": inline}},
        {"type": "image_url", "image_url": inline},
    ]
    prompts = prompts_of(folder, [{"messages": [said("What is ", part, "?")]} for part in parts])
    assert len({prompt.content for prompt in prompts}) == 1
    assert len({prompt.tokens for prompt in prompts}) == 1
    [one] = prompts_of(folder, [{"messages": [said("What is ", part, "?")]} for part in parts], once=True)
    assert placeholders(one.tokens) == one.images[0].num_tokens > 1
    [other] = prompts_of(folder, [{"messages": [said("What is ", picture("1.png"), "?")]}])
    assert other.content != one.content


def test_a_prompt_comes_back_from_its_table_with_its_images(folder: Path) -> None:
    rows = [{"messages": [said("What is ", picture("0.png"), "?"), assistant("Red."), said(picture("1.png"))]}]
    prompts = prompts_of(folder, [*rows, {"text": "No picture."}])
    assert list(PromptTable(prompts)) == prompts
    assert [len(prompt.images) for prompt in prompts] == [2, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_only_answers_are_supervised_beside_images(folder: Path, family: str) -> None:
    """All image tokens of a conversation are there, and none is learnt."""
    rows = [
        {
            "messages": [
                said("A picture.\n\n", picture("0.png"), "\n\nWhat is it?"),
                assistant("A red picture."),
                said(picture("1.png"), "And that?"),
                assistant("Another one."),
            ]
        }
    ]
    [prompt] = prompts_of(folder, rows, family, given=True)
    tokenizer = target(family).require_tokenizer()
    [(tokens, mask)] = given_sequences(prompt, tokenizer)
    learnt = tokenizer.decode([token for token, is_learnt in zip(tokens, mask, strict=True) if is_learnt])
    assert learnt == "A red picture.<|end|>Another one.<|end|>"
    assert placeholders(tokens, family) == sum(image.num_tokens for image in prompt.images)
    assert tuple(tokens[: len(prompt.tokens)]) == prompt.tokens
    assert placeholders(prompt.tokens, family) == prompt.images[0].num_tokens


def test_generation_markers_are_found_after_images(folder: Path) -> None:
    tokenizer = target("qwen2_5_vl").require_tokenizer()
    template = tokenizer.chat_template
    content = "{% for part in message['content'] %}"
    begin, end = template.index(content), template.index("{% endfor %}{% endif %}") + len("{% endfor %}")
    loop = template[begin:end]
    role = "message['role'] == 'assistant'"
    marked = template.replace(
        loop, f"{{% if {role} %}}{{% generation %}}{loop}{{% endgeneration %}}{{% else %}}{loop}{{% endif %}}"
    )
    rows = [{"messages": [said(picture("1.png"), "What is it?"), assistant("A red picture.")]}]
    [prompt] = prompts_of(folder, rows, given=True)
    tokenizer.chat_template = marked
    try:
        [(tokens, mask)] = given_sequences(prompt, tokenizer)
    finally:
        tokenizer.chat_template = template
    learnt = [token for token, is_learnt in zip(tokens, mask, strict=True) if is_learnt]
    assert tokenizer.decode(learnt) == "A red picture."


def recipe_of(folder: Path, rows: list[dict[str, Any]], **data: Any) -> Recipe:
    file = write_rows(folder / "rows.jsonl", rows)
    return data_recipe(folder / "out", prompts=[file], **{"max_new_tokens": 8} | data)


CONVERSATION = {"messages": [said("A picture.", picture("0.png")), assistant("x"), said(picture("1.png"), "And that?")]}


def test_the_target_answers_every_turn_with_the_images_so_far(folder: Path) -> None:
    own = target("gemma3")
    made = recipe_of(folder, [CONVERSATION, {"messages": [user("No picture.")]}], batch_size=4)
    data = distill(made, own)
    table = load_responses(data)
    [prompt, _] = prompts_of(folder, [CONVERSATION, {"messages": [user("No picture.")]}], "gemma3")
    answers: list[list[int]] = []
    while (question := next_question(prompt, answers, own.require_tokenizer())) is not None:
        images = own.image_inputs(question, prompt.images)
        assert images is not None
        assert len(images.values["pixel_values"]) == 1 + len(answers)
        answers += Decoder(own).generate([list(question)], 8, plan=Plan(0), images=[images]).tokens
    rows = [row for row in table if row["id"] == prompt.id]
    learnt = [t for row in rows for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]
    assert learnt == [token for answer in answers for token in answer]
    assert [row["images"] for row in table if row["id"] != prompt.id] == [[]]
    assert rows[-1]["images"] == [image.digest for image in prompt.images]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_read_back_with_its_images(folder: Path, family: str) -> None:
    """Its hidden states are those that the target has of the same conversation."""
    own = target(family)
    rows = [CONVERSATION | {"messages": [*CONVERSATION["messages"], assistant("A red one.")]}]
    table = load_responses(data := distill(recipe_of(folder, rows, answers="given"), own))
    images = images_of(data, table, own)
    assert images is not None
    (folder / "0.png").unlink()  # the data set has its own
    tokens = torch.tensor([table[0]["input_ids"]])
    states = own.forward(tokens, images=images.of(0), logits=False).last
    values = own.images.inputs([png(seed=0), png(seed=1, width=180)])
    assert_same(states, own.forward(tokens, images=values, logits=False).last)
    stored = data / "images" / table[0]["images"][0]
    stored.write_bytes(png(seed=7))
    with pytest.raises(BadInputError, match="the image was changed"):
        images.of(0)
    with pytest.raises(BadInputError, match=stored.name):
        load_responses(data)


def test_an_answer_with_a_marker_ends_its_conversation(folder: Path) -> None:
    """Its text would stand for an image in the next question."""
    own = target("qwen2_5_vl")
    [prompt] = prompts_of(folder, [CONVERSATION])
    assert own.image_token is not None
    assert next_question(prompt, [[own.image_token, 9]], own.require_tokenizer()) is None
    assert next_question(prompt, [[9]], own.require_tokenizer()) is not None


def test_a_row_that_is_cut_inside_an_image_is_dropped(folder: Path) -> None:
    own, messages = target("llava"), [*CONVERSATION["messages"], assistant("A red one.")]
    [prompt] = prompts_of(folder, [{"messages": messages}], "llava", given=True)
    [(tokens, _)] = given_sequences(prompt, own.require_tokenizer())
    cut = len(tokens) - list(reversed(tokens)).index(own.image_token) - 1
    rows = [{"messages": messages}, {"messages": [user("No picture."), assistant("None.")]}]
    longest = len(prompt.tokens)
    made = recipe_of(folder, rows, answers="given", max_prompt_tokens=longest, max_new_tokens=cut - longest)
    table = load_responses(distill(made, own))
    assert [row["images"] for row in table] == [[]]


def test_a_row_is_dropped_in_which_the_target_wrote_an_image_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = target("llava")
    monkeypatch.setattr(
        "outrider.distill.decoding.Responder._answers",
        lambda self, asked, prompts: {i: [own.image_token, 9] if prompts[i].images else [9, 9] for i in asked},
    )
    rows = [{"messages": [said(picture("0.png"), "What?")]}, {"messages": [user("No picture.")]}]
    table = load_responses(distill(recipe_of(folder, rows), own))
    assert [row["images"] for row in table] == [[]]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"servers": ["http://localhost:1"], "requests": {"model": "m"}}, "data.servers: this works with text alone"),
        ({"learn_prompts": True}, "data.learn_prompts: this works with text alone"),
        ({"on_policy": 0.5}, "data.on_policy: this works with text alone"),
    ],
)
def test_what_does_not_work_with_images_is_refused_before_an_answer(
    folder: Path, data: dict[str, Any], reason: str
) -> None:
    rows = [{"messages": [said(picture("0.png"), "What?")]}]
    with pytest.raises(BadInputError, match=reason):
        distill(recipe_of(folder, rows, **data), target("llava"))
    assert not (folder / "out" / "data").exists()


def test_a_target_without_sight_refuses_rows_with_images(folder: Path, tiny_target: Target) -> None:
    rows = [{"messages": [user("No picture.")]}, {"messages": [said(picture("0.png"), "What?")]}]
    with pytest.raises(RowError, match="row 2: an image, and what was asked for reads none, or the target sees none"):
        distill(recipe_of(folder, rows), tiny_target)
    found = load_responses(distill(recipe_of(folder, rows, malformed="drop"), tiny_target))
    assert "images" not in found.column_names


def test_a_measured_image_is_not_learnt(folder: Path) -> None:
    suite = write_rows(folder / "suite.jsonl", [{"messages": [said(picture("0.png"), "What?")]}])
    measured = SuitePrompts.of([suite])
    inline = {"type": "image_url", "image_url": {"url": data_url(png(seed=0))}}
    with pytest.raises(BadInputError, match="row 1 asks what the suite"):
        prompts_of(folder, [{"messages": [said(inline, "What?")]}], measured=measured)
    assert prompts_of(folder, [{"messages": [said(picture("1.png"), "What?")]}], measured=measured)


def test_text_that_holds_an_image_marker_is_refused(folder: Path) -> None:
    rows = [{"messages": [said(picture("0.png"), "What is <|image_pad|>?")]}]
    with pytest.raises(RowError, match=r"row 1: the chat template writes 2 markers .* for 1 images"):
        prompts_of(folder, rows)
