"""The memory that a generation needs, before any of it is allocated.

It is the target's cache and the drafter's state, both to the byte, and about what the largest step works with: the
target's passes as measured on a few tokens (`targets.pass_memory`), and what is made of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..common import BadInputError
from ..common.machine import free_bytes
from ..heads import Drafter
from ..targets import Target
from .plan import Plan
from .rule_table import RULES, DraftPolicy, Rule
from .sampling import Sampling
from .static_batch import margin, window_of

# Below this nothing is checked: short requests pay nothing.
SMALL = 64 * 2**20

# Bytes that filters, processors, and the choice of a tree's drafts make of each logit.
_NUCLEUS = 24
_MIN_P = 16
_PROCESSED = 8
_PICKED = {DraftPolicy.MOST_PROBABLE: 8, DraftPolicy.DRAWN: 40, DraftPolicy.SHARED_NOISE: 40}
_WIDENED = 6  # more of logits in 16 bits, which are copied in single precision


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
    caches = target.cache_bytes(load.rows, load.target_length), _state_bytes(target, drafter, load)
    return MemoryNeed(*caches, _working_bytes(target, drafter, load))


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


def _working_bytes(target: Target, drafter: Drafter | None, load: Load) -> int:
    """Return the bytes of the largest step, or somewhat more: a pass over the prompts, a verification, or a draft."""
    footprint = target.footprint()
    tokens = load.rows * load.prompt
    places = _places(drafter, load)
    state = target.hidden_size * target.dtype.itemsize
    taps = 0 if drafter is None else len(drafter.taps) * state
    # Taps below the last layer are kept while the layers after them run, and by the drafter until it reads them.
    whole = footprint.of_prompt(load.rows, load.prompt)
    prompts = max(whole + tokens * taps, tokens * (state + 2 * taps) + _logit_bytes(target, load, 1))
    verified = footprint.of_round(load.rows, places, load.target_length)
    judged = load.rows * places * (state + taps) + _logit_bytes(target, load, places)
    left = 0 if load.fixed else target.cache_bytes(load.rows - 1, load.target_length) // (2 * target.num_layers)
    if drafter is None or not drafter.abilities.reads_nodes:
        return max(prompts, max(verified, judged, left) + tokens * taps)
    # A head reads the prompts' states, with about the working memory of one of the target's layers, and may keep the
    # logits of all its drafts; a tree's are picked from a level's at once.
    logits = load.rows * target.vocab_size
    reading = tokens * (state + 3 * taps) + whole if taps else 0
    kept = tokens * taps + logits * footprint.kept * load.depth * (taps > 0)
    each = footprint.kept + _PICKED[_rule(load).pick] + (_WIDENED if footprint.kept < 4 else 0)
    tree = load.plan.tree
    widest = load.plan.width if tree is None else len(set(tree.parents))  # nodes that have children
    drafted = logits * widest * each if load.plan.is_tree else 0
    return max(prompts, reading, kept + max(verified, judged, drafted, left))


def _logit_bytes(target: Target, load: Load, places: int) -> int:
    """Return the bytes of the target's logits at `places` of each row, and of what the rule makes of them."""
    footprint = target.footprint()
    sampling = load.sampling
    rule = _rule(load)
    each, once = rule.logit_bytes
    if rule.samples:
        each += 4  # the drafts' own distributions
    if sampling.top_p is not None:
        each = max(each, _NUCLEUS)
    elif sampling.min_p:
        each = max(each, _MIN_P)
    if sampling.repetition_penalty != 1 or sampling.bad_words or sampling.suppress or sampling.min_new_tokens:
        each += _PROCESSED
    return int(load.rows * target.vocab_size * (places * max(footprint.per_logit, footprint.kept + each) + once))


def _rule(load: Load) -> Rule:
    return RULES[load.plan.rule(load.sampling.temperature, deterministic=not load.depth)]
