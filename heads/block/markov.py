"""Small heads on a block's states, by which a draft knows the one before it, and how sure the drafter is of it.

What every slot says is decided in one pass, in which no draft has seen another. A Markov head adds, draft by draft,
what the token just before makes likely: a product of two thin matrices (DSpark, arXiv 2607.05147, §3). A confidence
head says how probable the next draft is to be accepted, before it is drawn.

Shapes: A blocks, k drafts, W nodes, H hidden size, r rank, V target vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...common import BadInputError

KINDS = ("vanilla", "gated", "rnn")


def check_kind(name: str) -> None:
    """Raise BadInputError if there is no such Markov head."""
    if name not in KINDS:
        raise BadInputError(f"drafter: markov_head must be one of {', '.join(KINDS)}, found {name!r}.")


class MarkovHead(nn.Module):
    """A head that adds logits by the token before: W2 · reading(W1[token]).

    The reading is the code W1[token] itself (`vanilla`), the code through a gate of state and code (`gated`), or that
    of a small recurrent cell over all drafts of the path (`rnn`). W2 begins at zero: a new head changes nothing.
    """

    def __init__(self, kind: str, rank: int, hidden_size: int, vocab_size: int, draft_vocab_size: int):
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(hidden_size + 2 * rank, 3 * rank) if kind == "rnn" else None
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def code(self, tokens: Tensor) -> Tensor:
        """Return W1 of `tokens` `[...]`, `[..., r]`."""
        return self.markov_w1(tokens)

    def start(self, hidden: Tensor) -> Tensor:
        """Return the memory before a path's first draft, `[..., r]`, for states `[..., H]`."""
        return hidden.new_zeros(*hidden.shape[:-1], self.rank)

    def read(self, code: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return what W2 reads for the next draft, `[..., r]`, and the memory after it, `[..., r]`.

        Args:
            code: of the token before, `[..., r]`.
            hidden: the state that says the draft, `[..., H]`.
            memory: of the drafts before, `[..., r]`.
        """
        if self.gate_proj is not None:
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, code], -1))) * code, memory
        if self.joint_proj is not None:
            gate, fresh, out = self.joint_proj(torch.cat([memory, code, hidden], -1)).chunk(3, -1)
            share = torch.sigmoid(gate)
            return torch.tanh(out), share * memory + (1 - share) * torch.tanh(fresh)
        return code, memory

    def bias(self, reading: Tensor) -> Tensor:
        """Return what is added to logits, `[..., V']`, of readings `[..., r]`."""
        return self.markov_w2(reading)

    def along(self, codes: Tensor, hidden: Tensor) -> Tensor:
        """Return the readings of whole blocks, `[A, k, r]`, of codes `[A, k, r]` and states `[A, k, H]`."""
        memory, readings = self.start(hidden[:, 0]), []
        for code, state in zip(codes.unbind(1), hidden.unbind(1), strict=True):
            reading, memory = self.read(code, state, memory)
            readings.append(reading)
        return torch.stack(readings, 1)


class ConfidenceHead(nn.Module):
    """A head that says how probable drafts are to be accepted: a linear layer on the state, and on the code before."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, code: Tensor) -> Tensor:
        """Return log-odds `[...]` of states `[..., H]` and codes `[..., r]`; the code only if it is wide enough for."""
        both = torch.cat([hidden, code], -1)
        return self.proj(both[..., : self.proj.in_features])[..., 0]
