"""An answer ends as its target's chat template ends a turn, whatever the server sends; an unknown end is not made up.

What is right is computed by the library's `apply_chat_template` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from outrider.distill import load_responses, provenance
from outrider.targets import Target

from ..conftest import TEXT, byte_level_bpe, make_llama
from .conftest import Place, Server, Tokenizer, assistant, user

TURNS = ("sort the names", "and print them")
ANSWERS = ("sorted(names)", "for name in names:\n    print(name)")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A tokenizer's special tokens, the name of its eos token, the target's end tokens, and the chat template."""

    special: tuple[str, ...]
    eos: str
    ends: tuple[str, ...]
    template: str
    bos: str | None = None
    thought: str = ""


ML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
OSS = ("<|endoftext|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>")
FAMILIES = {
    "chatml": Family(ML, "<|im_end|>", ("<|im_end|>", "<|endoftext|>"), CHATML),
    "chatml, eos ends texts": Family(ML, "<|endoftext|>", ("<|endoftext|>", "<|im_end|>"), CHATML),
    "qwen base": Family(ML, "<|endoftext|>", ("<|endoftext|>",), CHATML),
    "qwen3": Family(ML, "<|im_end|>", ("<|im_end|>", "<|endoftext|>"), QWEN3),
    "qwen3, thinking": Family(ML, "<|im_end|>", ("<|im_end|>", "<|endoftext|>"), QWEN3, thought="names are for print"),
    "llama3": Family(LLAMA, "<|end_of_text|>", ("<|end_of_text|>", "<|eot_id|>"), LLAMA3, "<|begin_of_text|>"),
    "gemma": Family(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", ("<eos>", "<end_of_turn>"), GEMMA, "<bos>"
    ),
    "gpt-oss": Family(OSS, "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>"), GPT_OSS),
    "gpt-oss, thinking": Family(
        OSS, "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>"), GPT_OSS, thought="names are for print"
    ),
    "no end mark": Family(("<|endoftext|>", "<|pad|>"), "<|endoftext|>", ("<|endoftext|>",), ENDLESS),
}
UNKNOWN = ("qwen base", "no end mark")


def target_of(family: Family) -> Target:
    tokenizer = Tokenizer(
        tokenizer_object=byte_level_bpe(list(family.special), TEXT),
        eos_token=family.eos,
        bos_token=family.bos,
        chat_template=family.template,
    )
    ends = [int(tokenizer.convert_tokens_to_ids(end)) for end in family.ends]
    return Target(make_llama(vocab=len(tokenizer), eos_token_id=ends), tokenizer)


def written(target: Target, family: Family, turn: int = 0) -> list[int]:
    """Return the tokens that the template writes for an answer, as far as the end of its turn."""
    tokenizer = target.require_tokenizer()
    asked = [user(TURNS[0]), *([assistant(ANSWERS[0]), user(TURNS[1])] if turn else [])]
    answer = assistant(ANSWERS[turn])
    answer |= {"reasoning_content": family.thought, "thinking": family.thought} if family.thought else {}

    def tokens(messages: list[dict[str, Any]], prompt: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    before, whole = tokens(asked, True), tokens([*asked, answer], False)
    if family.template == ENDLESS:  # its turns end in a line break, which is no end token
        return whole[len(before) : -1]
    if family.template == QWEN3 and not family.thought:  # the target thought nothing, and wrote no mark of it
        before = [*before, *tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"]]
    assert whole[: len(before)] == before
    answer_ids = whole[len(before) :]
    ends = tokenizer.convert_tokens_to_ids([*family.ends, "<|im_end|>"])
    return answer_ids[: next(n for n, token in enumerate(answer_ids) if token in ends) + 1]


@dataclass
class Scripted(Server):
    """A server that says the script, `[turn][T]`, each with its end token as the last.

    `hides_end`: it neither counts nor returns it. `cut`: tokens after which it stops for their number. `thought` is
    sent beside a chat's text.
    """

    script: list[list[int]] = field(default_factory=list)
    hides_end: bool = False
    cut: int | None = None
    thought: str = ""

    def _completed(self, body: dict[str, Any], tokens: list[int], is_chat: bool) -> dict[str, Any]:
        tokenizer = self.target.require_tokenizer()
        turn = int(TURNS[1] in tokenizer.decode(tokens))
        ids = self.script[turn][: self.cut]
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        if is_chat and (self.thought or "final" in text):  # what parsers of thoughts and channels leave
            text = ANSWERS[turn] if self.cut is None else text.rpartition("final")[2]
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop" if self.cut is None else "length",
            "logprobs": None,
        }
        message = {"role": "assistant", "content": text, "reasoning_content": self.thought or None}
        choice |= {"message": message} if is_chat else {"text": text}
        if body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": tokens}
        self.changed(choice)
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(ids) - self.hides_end, "total_tokens": 0}
        return {"id": "1", "object": "", "created": 0, "model": "m", "choices": [choice]} | {"usage": usage}


SERVERS: dict[str, dict[str, Any]] = {
    "chat, the end counted": {"ids": False, "completions": False},
    "chat, the end not counted": {"ids": False, "completions": False, "hides_end": True},
    "completions": {"ids": False, "chat": False},
    "completions, the end not counted": {"ids": False, "chat": False, "hides_end": True},
    "ids": {},
    "cut": {"ids": False, "completions": False, "cut": 3},
}
Start = Callable[..., Server]


@pytest.fixture
def start_scripted() -> Iterator[Start]:
    """`start_scripted(**how)`: a running server of a script."""
    started: list[Scripted] = []

    def start(**how: Any) -> Scripted:
        started.append(Scripted(**how))
        started[-1].start()
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.mark.parametrize("how", SERVERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_learnt_are_the_tokens_that_the_template_writes(
    name: str, how: str, tmp_path: Path, start_scripted: Start
) -> None:
    family = FAMILIES[name]
    target = target_of(family)
    answer = written(target, family)
    if name in UNKNOWN:  # a server stops at the target's end, which the template does not write
        turn_end = target.require_tokenizer().convert_tokens_to_ids("<|im_end|>")
        answer = [*(token for token in answer if token != turn_end), target.eos_ids[0]]
    server = start_scripted(target=target, script=[answer], thought=family.thought, **SERVERS[how])
    place = Place(tmp_path, target, [{"messages": [user(TURNS[0])]}], {"max_new_tokens": 3 if how == "cut" else 90})
    if family.template == GPT_OSS and ("completions" in how or how == "cut"):  # channels' names are in no text
        place.refuses("nothing can be learnt from the 1 responses \\(other_tokens 1\\)", "run", server)
        return
    folder = place.distil("run", server)
    [row] = load_responses(folder)
    learnt = [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
    counts = provenance(folder)["counts"]
    is_unknown = name in UNKNOWN and how not in ("ids", "cut")
    assert learnt == answer[: 3 if how == "cut" else -1 if is_unknown else None]
    assert (counts["answers"], counts.get("ends_unknown", 0)) == (1, is_unknown)
    assert counts.get("answers_cut", 0) == (how == "cut")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in UNKNOWN])
def test_a_conversation_stays_one_row_where_the_template_keeps_its_turns(
    name: str, tmp_path: Path, start_scripted: Start
) -> None:
    """And what follows an answer begins after the end that the target wrote."""
    family = FAMILIES[name]
    target = target_of(family)
    script = [written(target, family, turn) for turn in (0, 1)]
    server = start_scripted(target=target, script=script, thought=family.thought, ids=False, completions=False)
    place = Place(tmp_path, target, [{"turns": list(TURNS)}], {"max_new_tokens": 90})
    rows = list(load_responses(place.distil("run", server)))
    learnt = [[t for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m] for row in rows]
    keeps = not family.thought and family.template != GPT_OSS
    assert learnt == ([[*script[0], *script[1]]] if keeps else script)


def spoiled(change: Callable[[list[int]], list[int]]) -> Callable[[dict[str, Any]], None]:
    def spoil(choice: dict[str, Any]) -> None:
        if "token_ids" in choice:
            choice["token_ids"] = change(choice["token_ids"])

    return spoil


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ids: ids[:-1] * 50, "too_long"),
        (lambda ids: [*ids, 5, 6], "after_end"),
        (lambda ids: [*ids, ids[-1]], "after_end"),
        (lambda ids: [*ids[:-1], 319 + 50], "foreign_tokens"),
        (lambda ids: ids[:3], "other_tokens"),
        ("echo", "repeated_prompt"),
    ],
    ids=["much longer", "ids after its end", "its end twice", "a foreign id", "cut ids", "its prompt"],
)
def test_an_answer_that_is_none_to_what_was_asked_is_dropped(
    change: Any, reason: str, tmp_path: Path, start_scripted: Start
) -> None:
    family = FAMILIES["chatml"]
    target = target_of(family)
    script = [written(target, family)]
    if change == "echo":
        text = target.require_tokenizer().apply_chat_template(
            [user(TURNS[0])], tokenize=False, add_generation_prompt=True
        )
        asked = target.require_tokenizer()(text, add_special_tokens=False)["input_ids"]
        script, change = [[*asked, *script[0]]], lambda ids: ids
    server = start_scripted(target=target, script=script, changed=spoiled(change), chat=False)
    server.status = lambda body: 200 if "return_token_ids" in body else 422
    place = Place(tmp_path, target, [{"messages": [user(TURNS[0])]}], {"max_new_tokens": 90})
    place.refuses(reason, "run", server, requests={"interface": "completions"})
