"""Speculative decoding in its plainest form: one text, no caches, no batches. Read this first.

A drafter that is cheap to run proposes the next few tokens, as a chain or as a tree in which siblings are alternatives.
The target reads all of them in one pass and keeps a path of them, by a rule that leaves its own law unchanged: the text
is distributed as if the target had drawn it alone, token by token; at temperature 0 it is the same text.

The engine does the same with caches, in batches, under more rules and in captured graphs (`engine`, `round`, `rules`).
Its tests hold it to this, token by token and round by round (tests/decode/test_reference.py).

Shapes: V vocabulary. Nodes of a tree are numbered as in `Tree`: −1 is the root, the last token of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .plan import Tree
from .rng import uniforms
from .sampling import ACCEPT, CORRECT, DRAFT


@dataclass(frozen=True)
class ReferenceDecoder:
    """A speculative decoder of one text."""

    target: Callable[[list[int]], Tensor]  # gives the logits `[V]` of the token that follows a text
    drafter: Callable[[list[int], list[int]], Tensor]  # the same, of a text and some drafts after it
    depth: int = 3  # drafts of a chain
    tree: Tree | None = None  # the shape of a tree to draft instead
    temperature: float = 0.0  # 0 for the most probable token
    seed: int = 0  # with `sequence`, the purpose of a random number and its place in the text, decides it
    sequence: int = 0  # see `seed`

    def generate(self, prompt: list[int], max_new_tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the new tokens, and for each round how many drafts were verified and how many were accepted."""
        text = [*prompt, _draw(self._law(self.target(prompt)), self._uniform(CORRECT, len(prompt)))]
        rounds = []
        while len(text) < len(prompt) + max_new_tokens:
            drafts = self._draft(text)
            kept, following = self._verify(text, drafts)
            text += [*kept, following]
            rounds.append((len(drafts), len(kept)))
        return text[len(prompt) :][:max_new_tokens], rounds

    def _draft(self, text: list[int]) -> dict[int, tuple[int, Tensor]]:
        """Return the token of each node that has one, and the law q that it was drawn from.

        A drafter may find fewer tokens possible than a node has children.
        """
        tree = self._shape()
        drafts = dict[int, tuple[int, Tensor]]()
        for node, children in tree.children.items():
            if children and (node < 0 or node in drafts):
                path, above = list[int](), node
                while above >= 0:
                    path, above = [drafts[above][0], *path], tree.parents[above]
                tokens = self._siblings(self.drafter(text, path), len(children), len(text), node)
                drafts |= zip(children, tokens, strict=False)
        return drafts

    def _siblings(self, logits: Tensor, count: int, first: int, node: int) -> list[tuple[int, Tensor]]:
        """Return at most `count` different tokens after a node, each with the law q that it was drawn from."""
        q = self._law(logits)
        if self.temperature == 0:
            # A token that is simply chosen is one that is drawn from a law that gives it all probability.
            return [(token, torch.zeros_like(q).index_fill(0, torch.tensor(token), 1)) for token in _top(logits, count)]
        if self.tree is None:
            return [(_draw(q, self._uniform(DRAFT, first, first + node + 1)), q)]
        # The largest of log q + Gumbel noise are draws without replacement, in order (Kool et al., arXiv 1903.06059).
        noise = -(-self._uniform(DRAFT, first, node, torch.arange(len(q))).log()).log()
        siblings = []
        for token in _top(q.log() + noise, count):
            siblings.append((token, q))
            # The next sibling is drawn from q without this token.
            q = q.index_fill(0, torch.tensor(token), 0)
            q = q / q.sum()
        return siblings

    def _verify(self, text: list[int], drafts: dict[int, tuple[int, Tensor]]) -> tuple[list[int], int]:
        """Return the drafts that are kept, and the target's own token after them."""
        kept: list[int] = []
        p = self._law(self.target(text))
        children = self._shape().children
        untried = [node for node in children[-1] if node in drafts]
        while untried:
            node = untried.pop(0)
            x, q = drafts[node]
            if self._uniform(ACCEPT, len(text), len(text) + node) < p[x] / q[x]:
                # A draft x ~ q is kept with probability min(1, p(x)/q(x)). The round goes on with its children.
                kept.append(x)
                p = self._law(self.target(text + kept))
                untried = [child for child in children[node] if child in drafts]
            else:
                # After a refusal the token must come from what q has not covered of p: norm((p − q)+). The next sibling
                # is tried against that.
                p = (p - q).clamp(min=0)
                p = p / p.sum()
        # The bonus after the last draft, where p is the target's own law, or the correction after a refusal.
        return kept, _draw(p, self._uniform(CORRECT, len(text)))

    def _shape(self) -> Tree:
        return self.tree or Tree(tuple(range(-1, self.depth - 1)))

    def _law(self, logits: Tensor) -> Tensor:
        """Return the distribution that a token is drawn from, `[V]`; at temperature 0 one token has all of it."""
        if self.temperature == 0:
            return torch.zeros(len(logits), dtype=torch.double).index_fill(0, logits.argmax(), 1)
        return (logits.double() / self.temperature).softmax(-1)

    def _uniform(self, purpose: int, *place: int | Tensor) -> Tensor:
        return uniforms(self.seed, purpose, *(torch.as_tensor(key) for key in (self.sequence, *place)))


def _draw(law: Tensor, uniform: Tensor) -> int:
    """Return the token at which the cumulative distribution passes `uniform`."""
    return int((law.cumsum(0) <= uniform * law.sum()).sum())


def _top(scores: Tensor, count: int) -> list[int]:
    """Return the places of the highest of the scores that are possible."""
    best = scores.topk(count)
    return best.indices[best.values > float("-inf")].tolist()
