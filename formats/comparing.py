"""An export compared with the drafter it was made of: draft logits at every depth, both in fp32.

Ours come from a decoding session, the engine's from `reading`, which knows nothing but the files.

Shapes: k draft tokens, V target vocabulary, V' the drafter's own.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..common import IncompatibleError
from ..heads import Drafter, NodeSession
from ..targets import RowLengths, Target
from .reading import ProbeSequence

# A text long enough that positions, masks and rotary angles matter, and drafts deep enough that feedback does.
_LENGTH, _DEPTH = 24, 4
# Two orders of the same sums differ by less, in units of the logits' own spread.
TOLERANCE = 2e-3


def passage_of(target: Target, max_depth: int | None = None) -> ProbeSequence:
    """Return a passage of random tokens, the same for the same target, that both sides are asked about.

    Args:
        max_depth: the deepest that the drafter drafts, if it has a limit; all of it is asked about.
    """
    depth = max_depth or _DEPTH
    length = min(_LENGTH, (target.max_context or _LENGTH) - depth - 1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(target.vocab_size, (length + depth,), generator=generator).tolist()
    return ProbeSequence.of(target, drawn[: length + 1], drawn[length + 1 :])


@torch.no_grad()
def session_logits(drafter: Drafter, target: Target, passage: ProbeSequence) -> Tensor:
    """Return what a decoding session of `drafter`, in fp32, says at each depth of the passage, `[k, V]`."""
    drafter = copy.deepcopy(drafter).to(target.device).cast(torch.float32).eval()
    count = len(passage.tokens) - 1
    session = drafter.open(target, 1, count + len(passage.drafts) + 2)
    assert isinstance(session, NodeSession)
    hidden = passage.hidden[list(drafter.taps)].transpose(0, 1)[None] if drafter.taps else None
    session.update(passage.tokens[None, :-1], hidden, RowLengths.of([count], target.device))
    found = [session.prefill(passage.tokens[-1:])]
    found += [session.decode(draft[None, None])[:, 0] for draft in passage.drafts]
    return _over_target(torch.cat(found).float(), drafter.output_ids, len(passage.table))


def _over_target(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    if ids is None:
        return logits
    wide = logits.new_full((len(logits), vocab_size), -torch.inf)
    return wide.index_copy(1, ids.to(logits.device), logits)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of logits `[k, V]`, in units of ours' spread; infinite where only one has a token.

    A constant added to all logits of a depth is none.
    """
    if not torch.equal(ours.isinf(), theirs.isinf()):
        return float("inf")
    known = ~ours.isinf()
    ours, theirs = (torch.where(known, x, torch.nan) for x in (ours, theirs))
    apart = (ours - theirs) - (ours - theirs).nanmean(-1, keepdim=True)
    return float(apart[known].abs().max() / ours[known].std().clamp(min=1e-6))


def require_same(ours: Tensor, theirs: Tensor, what: str) -> float:
    """Return the `difference` of logits.

    Raises:
        IncompatibleError: it is above what rounding explains: the export would not be served as it was measured.
    """
    apart = difference(ours, theirs)
    if not apart <= TOLERANCE:
        first = next(d for d in range(len(ours)) if not difference(ours[d : d + 1], theirs[d : d + 1]) <= TOLERANCE)
        raise IncompatibleError(
            f"{what}: read back as the engine reads it, its logits differ from the drafter's by {apart:.2g} of their "
            f"spread, from depth {first + 1} on (rounding explains {TOLERANCE:g}). Nothing was written. This is likely "
            "a setting of the target or the head that the layout cannot say; please report it."
        )
    return apart
