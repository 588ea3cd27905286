"""Forced acceptance: drafters that really draft, at their full cost, while what they propose comes from a script.

The script is the target's own greedy continuation, known beforehand, with a wrong token at places drawn at random; the target
accepts what is right and refuses what is wrong. So a round's cost can be measured at any acceptance, without a drafter that
was trained to reach it. Every figure made this way says so: `"forced acceptance": true`.

Shapes: B rows, T tokens of a whole text, N drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.heads import Abilities, Choose, Drafter, DrafterConfig, Proposal
from outrider.targets import Counts, RaggedCache, Target


def make_script(texts: Sequence[Sequence[int]], share: float, vocab: int, seed: int = 0) -> Tensor:
    """`[B, T]`: what to draft at each place of `texts`, right with probability `share`, padded with zeros.

    Each place is drawn by itself and the same for every loop, so acceptance at any depth, given the depth before, is `share`.
    """
    longest = max(map(len, texts))
    right = torch.tensor([list(text) + [0] * (longest - len(text)) for text in texts])
    drawn = torch.rand(right.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(drawn < share, right, (right + 1) % vocab)


@dataclass
class _State:
    inner: Any
    script: Tensor  # [B, L], as long as the texts may become: rounds of fixed shapes read it at one place in memory
    read: Tensor  # [B], tokens that the target has processed: the root stands there


class Forced(Drafter):
    """Drafts chains like `inner`, and proposes what the script says.

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

    # ------------------------------------------------------------ decoding

    def open_state(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> _State:
        read = torch.zeros(batch_size, dtype=torch.long, device=target.device)
        state = _State(
            self.inner.open(target, batch_size, max_length, spare),
            read.new_zeros(batch_size, max_length),
            read,
        )
        self._tell(state)
        return state

    def lend(self, state: _State, cache: RaggedCache) -> None:
        raise NotImplementedError

    def _tell(self, state: _State) -> None:
        rows, length = (min(pair) for pair in zip(self.script.shape, state.script.shape, strict=True))
        state.script[:rows, :length] = self.script[:rows, :length].to(state.script.device)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return self.inner.state_bytes(target, batch_size, max_length, spare) + 8 * batch_size * max_length

    def absorb(
        self, state: _State, tokens: Tensor, hidden: Tensor | None, counts: Counts, path: Tensor | None = None
    ) -> None:
        state.inner.absorb(tokens, hidden, counts, path)
        state.read = state.read + counts.tensor

    def propose(
        self, state: _State, root: Tensor, depth: int, choose: Choose, ended: Callable[[], bool] | None = None
    ) -> Proposal:
        places = state.read[:, None] + torch.arange(1, depth + 1, device=root.device)
        given = iter(state.script.gather(1, places.clamp(max=state.script.shape[1] - 1)).unbind(1))

        def scripted(logits: Tensor, token_ids: Tensor | None) -> Tensor:
            choose(logits, token_ids)
            return next(given)

        return state.inner.propose(root, depth, scripted, ended)

    def begin(self, state: _State, root: Tensor) -> Tensor:
        return state.inner.begin(root)

    def extend(self, state: _State, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return state.inner.extend(tokens, parents)

    def select(self, state: _State, rows: list[int]) -> None:
        state.inner.select(rows)
        state.script, state.read = state.script[rows], state.read[rows]

    # ------------------------------------------------------------ rounds of fixed shapes

    def caches(self, state: _State) -> list[RaggedCache]:
        return state.inner.caches()

    def carried(self, state: _State) -> list[Tensor]:
        return [state.read, *state.inner.carried()]

    def carry(self, state: _State, tensors: list[Tensor]) -> None:
        state.read = tensors[0]
        state.inner.carry(tensors[1:])

    def reset(self, state: _State) -> None:
        state.inner.reset()
        state.read = torch.zeros_like(state.read)
        self._tell(state)


@contextmanager
def forced_assistant(model: Any, script: Tensor) -> Iterator[None]:
    """Inside, the most probable token of `model`, a causal LM that drafts for one row, is the one of `script` `[1, T]`."""

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
