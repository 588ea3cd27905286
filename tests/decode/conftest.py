"""What tests of the decoder share: prompts, models, drafters that are nearly right, and the library's own texts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process as library

from outrider.decode import Sampling
from outrider.heads import Abilities, Drafter, DrafterConfig, DraftModel, Proposal, Session, TextSession
from outrider.targets import RowLengths, Target

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def random_model(kind: str, changes: dict[str, Any] | None = None) -> PreTrainedModel:
    """Return a small model of an architecture, with random weights."""
    changes = changes or {}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(changes if "text_config" in changes else COMMON | changes))
    attention = "eager" if kind == "gemma2" else None
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval().requires_grad_(False)


def random_prompts(*lengths: int, vocab: int = 64) -> list[list[int]]:
    """Return prompts of these lengths; prompts of one length are alike."""
    return [torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


def scaled(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    """Return a copy whose weights are multiplied by `factor`: often right, not always."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(factor)
    return other


def blurred(model: PreTrainedModel, by: float = 0.06) -> PreTrainedModel:
    """Return a copy with noise in its weights, of `by` times their own spread: often right, not always."""
    copied, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.add_(by * weight.std() * torch.randn(weight.shape, generator=generator))
    return copied


class Scripted(Drafter):
    """Proposes what a function gives for a row, how many tokens it has committed, the round's number, and a depth."""

    name = "scripted"

    def __init__(self, drafts: Callable[[int, int, int, int], list[int]]):
        super().__init__(DrafterConfig())
        self.drafts = drafts

    @property
    def abilities(self) -> Abilities:
        return Abilities(deterministic=True)

    def open(self, target, batch_size, max_length, spare=0, cache=None):
        return ScriptedSession(self.drafts, batch_size)


class ScriptedSession(TextSession):
    def __init__(self, drafts: Callable[[int, int, int, int], list[int]], batch_size: int):
        self.drafts = drafts
        self.rows = list(range(batch_size))
        self.known = [0] * batch_size
        self.number = 0

    def update(self, tokens, hidden, counts, path=None):
        self.known = [n + c for n, c in zip(self.known, counts.values, strict=True)]

    def propose(self, root, depth):
        self.number += 1
        rows = zip(self.rows, self.known, strict=True)
        drafts = torch.tensor([self.drafts(row, known, self.number, depth) for row, known in rows], dtype=torch.long)
        return Proposal.chain(drafts.reshape(len(root), -1))

    def select(self, rows):
        self.rows, self.known = [self.rows[r] for r in rows], [self.known[r] for r in rows]


def fresh_session(target: Target, drafter: Drafter, text: list[int]) -> Session:
    """Return a session that has read `text` at once."""
    tokens, counts = torch.tensor([text]), RowLengths.of([len(text)], "cpu")
    cache = target.new_cache(1, len(text) + 8)
    hidden = target.forward(tokens, cache, drafter.taps).hidden
    cache.advance(counts)
    session = drafter.open(target, 1, len(text) + 8, cache=cache)
    session.update(tokens, hidden, counts)
    return session


def library_texts(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], new: int, **arguments: Any
) -> list[list[int]]:
    """Return what `transformers.generate` writes greedily, one prompt at a time."""
    texts = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        arguments |= {"attention_mask": torch.ones_like(tokens), "max_new_tokens": new, "do_sample": False}
        texts.append(model.generate(tokens, **arguments)[0, len(prompt) :].tolist())
    return texts


def library_steps(sampling: Sampling, prompt_length: int = 0, ends: Sequence[int] = ()) -> LogitsProcessorList:
    """Return the library's processors of logits, in the order of `transformers.generate`."""
    ends = list(ends)
    steps = [
        (sampling.repetition_penalty != 1, library.RepetitionPenaltyLogitsProcessor, [sampling.repetition_penalty]),
        (sampling.bad_words, library.NoBadWordsLogitsProcessor, [[list(w) for w in sampling.bad_words], ends]),
        (
            sampling.min_new_tokens,
            library.MinNewTokensLengthLogitsProcessor,
            [prompt_length, sampling.min_new_tokens, ends],
        ),
        (sampling.suppress, library.SuppressTokensLogitsProcessor, [list(sampling.suppress)]),
        (sampling.temperature, library.TemperatureLogitsWarper, [sampling.temperature]),
        (sampling.top_k, library.TopKLogitsWarper, [sampling.top_k]),
        (sampling.top_p, library.TopPLogitsWarper, [sampling.top_p]),
        (sampling.min_p, library.MinPLogitsWarper, [sampling.min_p]),
    ]
    return LogitsProcessorList([step(*arguments) for is_wanted, step, arguments in steps if is_wanted])


@pytest.fixture
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=4))


@pytest.fixture
def itself(target) -> DraftModel:
    """The target as its own drafter: every draft is right."""
    return DraftModel(copy.deepcopy(target.model))
