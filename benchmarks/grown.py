"""Targets and drafters of benchmarks: small ones that were trained, or grown from them into a real shape.

`--target embedded@8b` grows the target (`lab.grow`), and drafters that were trained for the small one grow with it:
texts and accepted drafts are real, and so is what they cost. `--shape KEY=VALUE` changes sizes of the shape.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.common import BadInputError
from outrider.common.machine import best_device
from outrider.costs.round_timing import draft_times
from outrider.heads import Drafter, DraftModel, Eagle3, Eagle3Config, Ngram, fuse, load_drafter
from outrider.lab.grow import grow, shape_config
from outrider.lab.grow_drafter import grow_drafter
from outrider.targets import Target
from outrider.targets.fast import use_fastest_pass
from outrider.targets.fast.select import CANDIDATES
from outrider.targets.loading import split_shape

PRUNED = 32_000  # outputs of the EAGLE-3 heads that were published for targets of eight billion parameters


@dataclass(frozen=True)
class Grown:
    """A target, and the small one that it was grown from: itself if it was not grown."""

    target: Target
    source: Target

    @classmethod
    def load(
        cls, arguments: Namespace, dtype: str | torch.dtype, device: torch.device | None = None, **least: int
    ) -> Grown:
        """Return the target of `--target` and `--shape`.

        Args:
            least: sizes of the shape where `--shape` does not say otherwise.

        Raises:
            BadInputError: sizes are given for a target that is not grown, or are no sizes.
        """
        path, shape = split_shape(arguments.target)
        if shape is None and arguments.shape:
            raise BadInputError(f"--shape changes sizes of a grown target, such as embedded@8b, not {path!r}.")
        like = None if shape is None else shape_config(shape, **(least | _sizes(arguments.shape)))
        source = Target.load(path, dtype=dtype, device=device or best_device())
        if like is None:
            return cls(source, source)
        model = grow(source.model, like)
        return cls(Target(model.requires_grad_(False), source.tokenizer, {"path": arguments.target}), source)

    def drafter(self, drafter: Drafter, draft_vocab: int | None = None) -> Drafter:
        """Return a drafter of the small target as it drafts for the grown one, in that one's dtype."""
        if self.target is self.source:
            return drafter
        return grow_drafter(drafter, self.source, self.target, draft_vocab).cast(self.target.dtype).eval()

    def drafters(self, names: Sequence[str], draft_vocab: int | None = None) -> dict[str, Drafter]:
        """Return drafters by name: `NAME=FOLDER` is one that was trained for the small target, `ngram` needs none.

        `ngram+NAME=FOLDER` is the fusion of both.

        Args:
            draft_vocab: outputs of grown heads; None for what `grow_drafter` takes.
        """
        found = {}
        for entry in names:
            name, _, folder = entry.partition("=")
            drafter = self.drafter(load_drafter(folder, self.source) if folder else Ngram(), draft_vocab)
            found[name] = fuse({"type": "ngram", "min_match": 2}, drafter) if name.startswith("ngram+") else drafter
        return found

    def untrained(self, **settings: Any) -> Eagle3:
        """Return an EAGLE-3 head in float32 that costs what published ones do, without having learned."""
        torch.manual_seed(0)
        config = Eagle3Config(draft_vocab_size=min(PRUNED, self.target.vocab_size), **settings)
        head = Eagle3.build(config, self.target, torch.arange(self.target.vocab_size).float())
        return head.float().to(self.target.device).eval()

    def draft_model(self, like: str) -> DraftModel:
        """Return the small target grown into another shape, which drafts exactly what this target writes."""
        return DraftModel(grow(self.source.model, shape_config(like, vocab_size=self.target.vocab_size)))

    @property
    def words(self) -> dict[str, Any] | None:
        """What conditions say of a target that was made for the occasion; None for one that has a fingerprint."""
        if self.target is self.source:
            return None
        sizes = self.target.config.to_diff_dict()
        return {"path": self.target.source["path"], "config": {k: v for k, v in sizes.items() if isinstance(v, int)}}


def run_by(target: Target, runner: str | None) -> None:
    """Let a target run its passes in the way of that name (`--runner`), None for the fastest on a GPU.

    Decoders that are made with `fast=False` leave it at that.
    """
    if runner is None:
        use_fastest_pass(target)
    else:
        next(known for known in CANDIDATES if known.name == runner).build(target)


def draft_seconds(target: Target, drafter: Drafter, depth: int, batch: int, context: int, repeats: int) -> list[float]:
    """Return the seconds of drafting 0, 1, …, `depth` tokens; of a copied text, which is short, none."""
    if drafter.abilities.deterministic:
        return [0.0]
    return draft_times(target, drafter, depth, batch, context, repeats, whole=True)


def _sizes(changes: Sequence[str]) -> dict[str, int]:
    """Return sizes by name, of KEY=VALUE."""
    try:
        return {name: int(value) for name, value in (change.split("=") for change in changes)}
    except ValueError as error:
        raise BadInputError(
            f"--shape: expected KEY=VALUE, as in num_hidden_layers=16; got {' '.join(changes)}."
        ) from error
