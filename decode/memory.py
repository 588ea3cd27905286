"""The memory that a generation needs, before any of it is allocated.

It is the target's cache and the drafter's state, both to the byte, and what the largest step works with: the passes as
measured on a few tokens (`targets.pass_memory`), and the tensors that the rules make of the logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch

from ..common import BadInputError
from ..common.machine import free_bytes
from ..heads import Drafter, NodeSession
from ..targets import PeakBytes, RowLengths, Target
from ..targets.prompts import rows_at_once
from .plan import Plan
from .rule_table import AT_ZERO, NOT_DRAWN, RULES, DraftPolicy, Rule
from .sampling import Sampling
from .static_batch import margin, window_of

# Below this nothing is checked: short requests pay nothing.
SMALL = 64 * 2**20

# What filters and the repetition penalty make of them at least, and what a tree's drafts are picked from.
_NUCLEUS = 20
_MIN_P = 9
_PENALTY = 14
_DIVIDED = 4
_BEST, _DRAWN = 8, 40


@dataclass(frozen=True)
class Load:
    """How much is generated at once."""

    rows: int
    prompt: int  # tokens of the longest prompt
    new: int  # `max_new_tokens`
    depth: int  # most drafts on a path; 0 if nothing is drafted
    plan: Plan
    sampling: Sampling
    fixed: bool = False  # whether rounds have fixed shapes (see `static_batch`)
    nodes: int = 0  # most draft tokens of a row, where the drafter makes the proposal itself; 0 for `depth` at most
    ahead: bool = False  # whether a round may be launched before the last one is read: finished rows write one more
    part: int = 0  # tokens of the largest part in which prompts are read; those of prompts of one length at least
    shares: bool = False  # whether what all prompts begin with is read once

    @property
    def length(self) -> int:
        """Entries of a row, one round's drafts included."""
        text = self.prompt + self.new
        return window_of(text + self.margin) if self.fixed else text + self.depth + 1

    @property
    def margin(self) -> int:
        """Entries that a round of fixed shape may write after the longest row."""
        once = margin(self.plan.max_nodes, self.plan.depth, self.plan.max_read) if self.depth else 3
        return 2 * once if self.ahead else once

    @property
    def spare(self) -> int:
        """Entries for the nodes of a tree beside its longest path."""
        return max(self.plan.max_nodes, self.plan.max_read) if self.depth and self.plan.is_tree else 0

    @property
    def target_length(self) -> int:
        """Entries of a row of the target's cache."""
        return self.length + (0 if self.fixed else max(self.spare, self.nodes - self.depth))


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a generation needs beside the weights."""

    target: int  # the target's cache
    drafter: int  # the drafter's state
    working: int  # the largest working memory of any one step

    @property
    def total(self) -> int:
        return self.target + self.drafter + self.working


def budget(target: Target, drafter: Drafter | None, load: Load) -> MemoryNeed:
    """Return the bytes that `load` needs."""
    drafter = drafter if load.depth else None
    # First: it may leave the drafter with a part of its state.
    working = max(_prompt_bytes(target, drafter, load), _round_bytes(target, drafter, load))
    return MemoryNeed(target.cache_bytes(load.rows, load.target_length), _state_bytes(target, drafter, load), working)


def _state_bytes(target: Target, drafter: Drafter | None, load: Load) -> int:
    if drafter is None or not load.depth:
        return 0
    spare = load.spare if drafter.abilities.reads_nodes else 0
    return drafter.state_bytes(target, load.rows, load.length, spare)


def require_memory(target: Target, drafter: Drafter | None, load: Load, held: int = 0) -> None:
    """Raise BadInputError if `load` needs more memory than is free on the target's device, with what would fit.

    `held`: bytes that are allocated for it already, or freed first.
    """
    least, most = _bounds(target, drafter, load)
    free = None if least < SMALL else free_bytes(target.device)
    if free is None or most <= free:
        return
    free, needed = free + held, budget(target, drafter, load)
    if needed.total > free:
        raise BadInputError(
            f"this generation needs {_gib(needed.total)} GiB (target cache {_gib(needed.target)}, drafter "
            f"{_gib(needed.drafter)}, working memory {_gib(needed.working)}) for {load.rows:,} sequences of up to "
            f"{load.prompt + load.new:,} tokens, {_gib(free)} GiB are free; "
            f"{_advice(lambda smaller: budget(target, drafter, smaller).total <= free, load)}"
        )


def _bounds(target: Target, drafter: Drafter | None, load: Load) -> tuple[int, int]:
    """Return two numbers of bytes between which the need lies, without measuring: far from the end that is enough."""
    tokens, places = load.rows * load.prompt, load.rows * _places(None, load)
    states, logits = (tokens + places) * target.hidden_size, places * target.vocab_size
    least = target.cache_bytes(load.rows, load.target_length) + states * 64 + logits * 16
    if least < SMALL:
        return least, least
    scores = max(int(layer.num_attention_heads) for layer in target.config.per_layer_config) * 16
    eager = getattr(target.config, "_attn_implementation", None) == "eager"
    pairs = load.rows * (load.prompt**2 * (scores if eager else 16) + _places(None, load) * load.length * (scores + 16))
    entries = load.rows * load.length * target.hidden_size * 64
    logits += load.rows * target.vocab_size
    return least, least + _state_bytes(target, drafter, load) + entries + pairs + states * 1024 + logits * 64


def _advice(fits: Callable[[Load], bool], load: Load) -> str:
    rows = _largest(load.rows, lambda count: fits(replace(load, rows=count)))
    new = _largest(load.new, lambda count: fits(replace(load, new=count)))
    ways = [f"the batch to about {rows:,}"] if rows else []
    ways += [f"max_new_tokens to about {new:,}"] if new else []
    if ways:
        return f"lower {', or '.join(ways)}."
    return "not even one such sequence fits: shorten the prompts, or take a smaller dtype or model."


def _largest(below: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number in 1 … `below` − 1 that fits; 0 for none."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}" if count >= 2**30 // 10 else f"{count / 2**30:.3f}"


def _places(drafter: Drafter | None, load: Load) -> int:
    """Return how many tokens of a row the largest verification pass has."""
    grows = drafter is None or drafter.abilities.reads_nodes
    return 1 + (0 if not load.depth else max(load.plan.max_nodes if grows else load.depth, load.nodes))


def _prompt_bytes(target: Target, drafter: Drafter | None, load: Load) -> int:
    """Return the working memory of the prompts: the target's pass, then the drafter's, and the first logits."""
    tokens, state = load.rows * load.prompt, target.hidden_size * target.dtype.itemsize
    taps = 0 if drafter is None else len(drafter.taps) * state
    # Taps below the last layer are kept while the layers after them run.
    inner = 0 if drafter is None else sum(tap < target.num_layers for tap in drafter.taps) * state
    part = max(rows_at_once(load.rows, load.prompt, target) * load.prompt, min(load.part, tokens))
    whole = 0 if part == tokens and not load.shares else tokens * taps
    own = target.footprint().of_prompt(part / load.prompt, load.prompt) + part * inner + whole
    kept = part * (state + taps + inner) + whole + _logit_bytes(target, load, 1, sampled=False)
    if drafter is None:
        return max(own, kept)
    return max(own, kept, tokens * taps + _reading(drafter, target).peak(load.rows, load.prompt))


def _round_bytes(target: Target, drafter: Drafter | None, load: Load) -> int:
    """Return the working memory of the largest round.

    It is the largest of the target's layers after the longest text, then its logits; of the drafter's logits, in a
    tree; and of the largest tensor of a cache when rows leave it.
    """
    places = _places(drafter, load)
    # Whether drafts come with the distributions that they were drawn from.
    sampled = drafter is not None and not drafter.abilities.deterministic and _rule(load).samples
    draws = load.rows * (places - 1) * target.vocab_size * 4 if sampled else 0
    state = load.rows * target.hidden_size * target.dtype.itemsize
    taps = 0 if drafter is None else len(drafter.taps)
    kept, features = places * state * (1 + taps), load.prompt * state * taps
    verified = target.footprint().of_round(load.rows, places, load.target_length)
    grows = drafter is not None and drafter.abilities.reads_nodes
    drafted = load.rows * target.vocab_size * _drafting_bytes(target, load) if grows else 0
    left = 0 if load.fixed else target.cache_bytes(load.rows - 1, load.target_length) // (2 * target.num_layers)
    reading = _reading(drafter, target)
    features += load.rows * (reading.kept + max(0, load.depth - 1) * reading.per_draft)
    return features + max(draws + max(verified, kept + _logit_bytes(target, load, places, sampled)), drafted, left)


def _drafting_bytes(target: Target, load: Load) -> int:
    """Return how many bytes a tree's widest pass makes of the logits of each token."""
    plan = load.plan
    if not plan.is_tree:
        return 0
    widest = plan.width
    if plan.tree is not None:
        widest = max(Counter(plan.tree.depths[parent] for parent in set(plan.tree.parents) - {-1}).values(), default=1)
    picked = _BEST if _rule(load).pick is DraftPolicy.MOST_PROBABLE else _DRAWN
    return widest * (target.footprint().kept + picked)


def _rule(load: Load) -> Rule:
    """Return the rule for proposals that are samples, if the drafter makes such."""
    return RULES[load.plan.rule(load.sampling.temperature, deterministic=False)]


def _logit_bytes(target: Target, load: Load, places: int, sampled: bool) -> int:
    """Return the bytes of the target's logits at `places` of each row, and of what the rule makes of them."""
    footprint, sampling = target.footprint(), load.sampling
    rule = _rule(load)
    rule = RULES[NOT_DRAWN] if rule.samples and not sampled else rule
    logit = footprint.kept
    each, once = rule.logit_bytes
    greedy = rule.name == AT_ZERO
    if greedy and target.device.type == "cpu" and logit < 4:
        each = 4  # `highest` copies them
    filters = 0 if greedy else max(_NUCLEUS if sampling.top_p is not None else 0, _MIN_P if sampling.min_p else 0)
    filters += _DIVIDED if filters and sampling.temperature != 1 else 0
    # What the processors leave beside a logit, need in between, and know of each token.
    processed = 0
    processing = 0
    context = 0
    if sampling.repetition_penalty != 1:
        processed = 4
        processing = _PENALTY + (0 if logit == 4 else 4)
        context = 1
    elif sampling.bad_words or sampling.suppress or sampling.min_new_tokens:
        processed, processing = logit, logit + 2
    most = max(
        places * footprint.per_logit,
        places * (logit + processing),
        places * (logit + processed + each) + once,
        places * (logit + processed + filters),
    )
    return int(load.rows * target.vocab_size * (most + context))


@dataclass(frozen=True)
class _PromptBytes:
    """Bytes that a drafter works with when it reads a prompt and begins."""

    per_row: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0  # of tokens
    kept: int = 0  # of each row, while the target verifies
    per_draft: int = 0  # kept of each further draft

    def peak(self, rows: int, length: int) -> int:
        """Return the bytes at one time for `rows` prompts of `length` tokens."""
        return int(rows * (self.per_row + length * (self.per_token + length * self.per_pair)))


_measured: WeakKeyDictionary[Drafter, dict[torch.dtype, _PromptBytes]] = WeakKeyDictionary()


def _reading(drafter: Drafter | None, target: Target) -> _PromptBytes:
    """Return the working memory of reading a prompt, measured once, on three short ones."""
    if drafter is None or not drafter.abilities.reads_nodes:
        return _PromptBytes()
    known = _measured.setdefault(drafter, {})
    if target.dtype not in known:
        (short, kept, per_draft), (middle, *_), (long, *_) = (_read(drafter, target, n) for n in (16, 64, 112))
        per_pair = max(0.0, ((long - middle) - (middle - short)) / (2 * 48**2))
        per_token = (long - short) / 96 - 128 * per_pair
        per_row = max(0.0, short - 16 * per_token - 256 * per_pair)
        known[target.dtype] = _PromptBytes(per_row, per_token, per_pair, kept, per_draft)
    return known[target.dtype]


@torch.no_grad()
def _read(drafter: Drafter, target: Target, length: int) -> tuple[int, int, int]:
    """Return the bytes of a drafter that reads `length` tokens and begins: the peak, those kept, and per draft."""
    cache = target.new_cache(1, length + 3 + (drafter.max_depth or 0))
    cache.skip(length)
    session = drafter.open(target, 1, length + 3, 0, cache)
    assert isinstance(session, NodeSession)
    tokens = torch.zeros(1, length, dtype=torch.long, device=target.device)
    hidden = torch.zeros(1, length, len(drafter.taps), target.hidden_size, dtype=target.dtype, device=target.device)
    with PeakBytes() as run:
        session.update(tokens, hidden, RowLengths.of([length], target.device))
        session.prefill(tokens[:, 0])
        peak, kept = run.peak, run.live
        if drafter.max_depth is None or drafter.max_depth > 1:
            session.decode(tokens[:, :1])
    return peak, kept, max(0, run.live - kept)
