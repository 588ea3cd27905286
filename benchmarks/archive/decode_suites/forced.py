"""Forced acceptance: drafters that really draft, at their full cost, while what they propose comes from a script.

The script is the target's own greedy continuation, known beforehand, with a wrong token at places drawn at random;
the target accepts what is right and refuses what is wrong. So a round's cost can be measured at any acceptance,
without a drafter that was trained to reach it. Every figure made this way says so: `"forced acceptance": true`.

Shapes: B rows, T tokens of a whole text, N drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from outrider.common import BadInputError
from outrider.heads import Abilities, Choose, Drafter, DrafterConfig, Ended, NodeSession, Proposal
from outrider.targets import RaggedCache, RowLengths, Target


def make_script(texts: Sequence[Sequence[int]], share: float, vocab: int, seed: int = 0) -> Tensor:
    """Return the token to draft at each place of `texts`, right with probability `share`, padded with zeros, `[B, T]`.

    Each place is drawn by itself and the same for every loop, so acceptance at any depth, given the depth before, is
    `share`.
    """
    longest = max(map(len, texts))
    right = torch.tensor([list(text) + [0] * (longest - len(text)) for text in texts])
    drawn = torch.rand(right.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(drawn < share, right, (right + 1) % vocab)


class Forced(Drafter[DrafterConfig]):
    """A drafter of chains that makes all passes of `inner`, and proposes the tokens of a script.

    Attributes:
        script: `[B, T]`, of the prompts that come next, in their order; see `make_script`.
    """

    name = "forced"

    def __init__(self, inner: Drafter):
        super().__init__(DrafterConfig())
        self.inner = inner
        self.script = torch.zeros(0, 0, dtype=torch.long)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    @property
    def max_depth(self) -> int | None:
        return self.inner.max_depth

    @property
    def abilities(self) -> Abilities:
        return self.inner.abilities

    @property
    def output_ids(self) -> Tensor | None:
        return self.inner.output_ids

    def check(self, target: Target) -> None:
        self.inner.check(target)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> ForcedSession:
        inner = self.inner.open(target, batch_size, max_length, spare, cache)
        if not isinstance(inner, NodeSession):
            raise BadInputError(f"forced acceptance needs a drafter that reads nodes, got {self.inner.name}.")
        script = torch.zeros(batch_size, max_length, dtype=torch.long, device=target.device)
        return ForcedSession(self, inner, script)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return self.inner.state_bytes(target, batch_size, max_length, spare) + 8 * batch_size * max_length


class ForcedSession(NodeSession):
    """The inner drafter's session, and the script that it proposes.

    Args:
        script: `[B, L]`, as long as the texts may become: rounds of fixed shapes read it at one place in memory.

    Attributes:
        read: tokens that the target has processed, `[B]`: the root stands there.
    """

    def __init__(self, drafter: Forced, inner: NodeSession, script: Tensor):
        super().__init__(inner.output_ids, inner.max_depth)
        self.drafter, self.inner, self.script = drafter, inner, script
        self.read = torch.zeros_like(script[:, 0])
        self._tell()

    def _tell(self) -> None:
        """Write down the script of the prompts that come next."""
        new = self.drafter.script
        rows, length = (min(pair) for pair in zip(new.shape, self.script.shape, strict=True))
        self.script[:rows, :length] = new[:rows, :length].to(self.script.device)

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        self.inner.update(tokens, hidden, counts, path)
        self.read = self.read + counts.tensor

    def propose(self, root: Tensor, depth: int, choose: Choose, ended: Ended | None = None) -> Proposal:
        places = self.read[:, None] + torch.arange(1, depth + 1, device=root.device)
        given = iter(self.script.gather(1, places.clamp(max=self.script.shape[1] - 1)).unbind(1))

        def scripted(logits: Tensor, token_ids: Tensor | None) -> Tensor:
            choose(logits, token_ids)
            return next(given)

        return self.inner.propose(root, depth, scripted, ended)

    def prefill(self, root: Tensor) -> Tensor:
        return self.inner.prefill(root)

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return self.inner.decode(tokens, parents)

    def caches(self) -> list[RaggedCache]:
        return self.inner.caches()

    def carried(self) -> list[Tensor]:
        return [self.read, *self.inner.carried()]

    def carry(self, tensors: list[Tensor]) -> None:
        self.read = tensors[0]
        self.inner.carry(tensors[1:])

    def reset(self) -> None:
        self.inner.reset()
        self.read = torch.zeros_like(self.read)
        self._tell()

    def select(self, rows: list[int]) -> None:
        self.inner.select(rows)
        self.script, self.read = self.script[rows], self.read[rows]


@contextmanager
def forced_assistant(model: Any, script: Tensor) -> Iterator[None]:
    """Let the most probable token of `model`, a causal LM that drafts for one row, be the one of `script` `[1, T]`."""
    wanted = script[0].tolist()

    def replace(_: Any, __: Any, given: dict[str, Any], output: Any) -> Any:
        place = given["past_key_values"].get_seq_length()  # of the token that the last logits predict
        output.logits[:, -1, wanted[min(place, len(wanted) - 1)]] = 1e4
        return output

    handle = model.register_forward_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
