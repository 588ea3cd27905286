"""The check of what a session's text part proposes: it may be somebody else's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ..common import IncompatibleError
from ..heads import Proposal, Session


@dataclass
class ProposalCheck:
    """A check of proposals: of shapes in each round, of contents in the first round of a request.

    What is wrong would end inside the target, or change the text. To read contents the host waits for the device.
    """

    vocab: int
    max_nodes: Callable[[int], int]  # the drafter's, of a depth
    is_done: bool = False  # whether contents were read

    def __call__(self, session: Session, proposal: Proposal, rows: int, depth: int) -> None:
        """Raise IncompatibleError for a wrong proposal of up to `depth` tokens."""
        problem = self._problem_of_shapes(proposal, rows, depth)
        if problem is not None:
            raise _refusal(session, problem)
        if proposal.tokens.shape[1] and not self.is_done:
            self.is_done = True
            self.check_contents(session, proposal)

    def check_contents(self, session: Session, proposal: Proposal) -> None:
        """Raise IncompatibleError for a proposal of right shapes whose contents are wrong."""
        problem = self._problem_of_contents(proposal)
        if problem is not None:
            raise _refusal(session, problem)

    def _problem_of_shapes(self, proposal: Proposal, rows: int, depth: int) -> str | None:
        most = depth if proposal.parents is None else self.max_nodes(depth)
        size, names = tuple(proposal.tokens.shape), ["tokens", "real", "parents", "read"]
        for name in names[:2] if proposal.parents is None else names:
            part, dtype = getattr(proposal, name), torch.bool if name == "real" else torch.long
            if part is None or part.dtype != dtype or part.shape != size or len(size) != 2 or size[0] != rows:
                found = "none" if part is None else f"{part.dtype} {list(part.shape)}"
                return f"{name} of {found}; expected {dtype} [{rows}, N]"
        if size[1] > most or (proposal.parents is None and proposal.depth != size[1]):
            return f"{size[1]} tokens that are {proposal.depth} deep; expected at most {most}, a chain as deep as long"
        return None

    def _problem_of_contents(self, proposal: Proposal) -> str | None:
        tokens = proposal.tokens
        real = proposal.real
        parents = proposal.parents
        outside = tokens[(tokens < 0) | (tokens >= self.vocab)]
        if len(outside):
            return f"token {int(outside[0])}; expected ids from 0 to {self.vocab - 1}, the target's vocabulary"
        numbers = torch.arange(tokens.shape[1], device=tokens.device)
        above = (numbers - 1).expand_as(tokens) if parents is None else parents
        if ((above < -1) | (above >= numbers)).any():
            return f"parents {above[0].tolist()} in its first row; expected −1 or the number of an earlier token"
        if (real & ~pad(real, (1, 0), value=True).gather(1, above + 1)).any():
            return "tokens after padding; expected none, as real says which are padding"
        ancestors = above
        for _ in range(proposal.depth - 1):
            ancestors = torch.where(ancestors < 0, -1, above.gather(1, ancestors.clamp(min=0)))
        if (ancestors >= 0).any():
            return f"a tree deeper than its depth of {proposal.depth}"
        return None


def _refusal(session: Session, problem: str) -> IncompatibleError:
    name = type(session if session.text is None else session.text).__name__
    advice = "Mend its propose (docs/developers/adding-a-drafter.md), or take another drafter."
    return IncompatibleError(f"the drafter's {name} proposed {problem}. {advice}")
