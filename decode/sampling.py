"""How a token is drawn: from logits to a distribution, and from that with randomness that belongs to its place.

Each uniform is a hash of (seed, sequence, position, stream, token), see `rng`. `DraftSampler`, at the end, picks draft
tokens by the same means as the target's own are drawn.

Shapes: B rows, Q places, N tokens that may stand before them (drafts), W tokens that bad words look back on (of a
drafter: nodes whose logits are known), C children of a node, V vocabulary, V' the drafter's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor

from ..common import BadInputError, IncompatibleError
from ..common.values import TEMPERATURES, is_temperature
from ..heads import Proposal
from .rng import Seed, uniforms
from .rule_table import DraftPolicy, Rule

# Streams keep draws for different purposes independent of each other.
DRAFT = 1
ACCEPT = 2
CORRECT = 3
COUPLED = 4

_NEVER = float("-inf")
_NO_TOKEN, _ANY_TOKEN = -1, -2
_BELOW_ONE = 1 - 2.0**-53


_WHOLE, _MAY_BE_NONE = ("top_k", "seed", "min_new_tokens"), ("top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Sampling:
    """How the target's tokens are drawn; the fields mean what they mean in `transformers.GenerationConfig`.

    Attributes:
        bad_words: token sequences that are never completed, wherever they began (`bad_words_ids`). As there, an end
            token alone is none.
        min_new_tokens: no end token before so many new tokens.
        suppress: tokens that are never drawn (`suppress_tokens`).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    suppress: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "min_new_tokens"):
            value, kind = getattr(self, name), Integral if name in _WHOLE else Real
            if not isinstance(value, kind) and not (value is None and name in _MAY_BE_NONE):
                raise BadInputError(f"sampling: {name} must be a {'whole ' * (kind is Integral)}number, got {value!r}.")
        checks = [
            (is_temperature(self.temperature), f"temperature must be {TEMPERATURES}", self.temperature),
            (self.top_k is None or self.top_k >= 1, "top_k must be >= 1", self.top_k),
            (self.top_p is None or 0 < self.top_p <= 1, "top_p must be in (0, 1]", self.top_p),
            (self.min_p is None or 0 <= self.min_p <= 1, "min_p must be in [0, 1]", self.min_p),
            (self.repetition_penalty > 0, "repetition_penalty must be > 0", self.repetition_penalty),
            (
                all(w and _are_tokens(w) for w in self.bad_words),
                "bad_words must hold sequences of at least one token id each",
                self.bad_words,
            ),
            (self.min_new_tokens >= 0, "min_new_tokens must be >= 0", self.min_new_tokens),
            (_are_tokens(self.suppress), "suppress must hold token ids", self.suppress),
        ]
        for fine, rule, value in checks:
            if not fine:
                raise BadInputError(f"sampling: {rule}, got {value}.")
        object.__setattr__(self, "bad_words", tuple(map(tuple, self.bad_words)))
        object.__setattr__(self, "suppress", tuple(self.suppress))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _are_tokens(values: object) -> bool:
    return isinstance(values, (tuple, list)) and all(isinstance(t, int) and t >= 0 for t in values)


@dataclass(frozen=True)
class Context:
    """The part of the text before a token that the processors use, at Q places of every row."""

    num_new: Tensor  # how many of its tokens were generated, [B, Q]
    recent: Tensor  # its last W tokens, [B, Q, W]; -1 where it is shorter
    present: Tensor | None  # which tokens occur in it, [B, Q, V]; None without a repetition penalty

    def then(self, tokens: Tensor, path: Tensor) -> Context:
        """Return the contexts at Q places after this one, which is a single place per row.

        Args:
            tokens: `[B, N]`, what may follow; a token comes after its ancestors.
            path: `[B, Q, N]` or `[1, Q, N]`, True where a token is on the way to the place: its ancestors, and itself.
        """
        path = path.expand(len(tokens), -1, -1)
        tokens, places = tokens[:, None].expand_as(path), path.shape[1]
        recent = _last(self.recent.expand(-1, places, -1), tokens, path)
        present = None if self.present is None else _mark(self.present.expand(-1, places, -1), tokens, path)
        return Context(self.num_new + path.sum(-1), recent, present)

    def rebound(self, change: Callable[[Tensor], Tensor]) -> Context:
        """Return this context with every tensor replaced by what `change` makes of it, in a fixed order."""
        present = None if self.present is None else change(self.present)
        return Context(change(self.num_new), change(self.recent), present)

    def select(self, rows: list[int]) -> Context:
        return Context(self.num_new[rows], self.recent[rows], None if self.present is None else self.present[rows])


class Processors:
    """Changes of logits that depend on the text before them, as in `transformers` and in its order, before the filters.

    A repetition penalty, bad words, no end before min_new_tokens, suppressed tokens: a forbidden one gets -inf.

    Raises BadInputError for a token outside the vocabulary.
    """

    def __init__(self, sampling: Sampling, vocab: int, eos: Collection[int], device: torch.device):
        for token in (*sampling.suppress, *(t for word in sampling.bad_words for t in word)):
            if token >= vocab:
                raise BadInputError(
                    f"sampling: suppress or bad_words holds token {token}, outside the target's vocabulary of {vocab}."
                )
        words = [tuple(w) for w in sampling.bad_words if not (len(w) == 1 and w[0] in eos)]
        longer = [w for w in words if len(w) > 1]
        self.sampling = sampling
        self.vocab = vocab
        self.eos = frozenset(eos)
        self.width = max(map(len, longer), default=1) - 1
        prefixes = [(_ANY_TOKEN,) * (self.width + 1 - len(w)) + w[:-1] for w in longer]
        self.prefixes = torch.tensor(prefixes, dtype=torch.long, device=device).reshape(len(longer), self.width)
        self.completing = torch.tensor([w[-1] for w in longer], dtype=torch.long, device=device)
        self.forbidden = _tokens_mask([*sampling.suppress, *(w[0] for w in words if len(w) == 1)], vocab, device)
        self.ends = _tokens_mask([t for t in eos if 0 <= t < vocab] if sampling.min_new_tokens else [], vocab, device)

    @property
    def idle(self) -> bool:
        """Whether every logit would stay what it is."""
        return self.sampling.repetition_penalty == 1 and not self.width and self.ends is None and self.forbidden is None

    def start(self, prompts: Tensor, counts: Tensor) -> Context:
        """Return the context after the prompts `[B, T]`, one place per row; row b has the first `counts[b]` tokens."""
        present = None
        if self.sampling.repetition_penalty != 1:
            present = prompts.new_zeros(len(prompts), 1, self.vocab, dtype=torch.bool)
        # Counted from here, the prompt's own tokens bring num_new to 0.
        nothing = Context(-counts[:, None], prompts.new_full((len(prompts), 1, self.width), _NO_TOKEN), present)
        real = torch.arange(prompts.shape[1], device=prompts.device) < counts[:, None]
        return nothing.then(prompts, real[:, None])

    def __call__(self, logits: Tensor, context: Context) -> Tensor:
        """Return the processed logits `[B, Q, V]` of the tokens that follow `context`."""
        if context.present is not None:
            logits = penalize(logits, context.present, self.sampling)
        if self.width:
            begun = ((context.recent[:, :, None] == self.prefixes) | (self.prefixes == _ANY_TOKEN)).all(-1)
            nowhere = torch.zeros_like(logits, dtype=torch.bool)
            logits = logits.masked_fill(_mark(nowhere, self.completing.expand_as(begun), begun), _NEVER)
        if self.ends is not None:
            early = context.num_new < self.sampling.min_new_tokens
            logits = logits.masked_fill(early[:, :, None] & self.ends, _NEVER)
        return logits if self.forbidden is None else logits.masked_fill(self.forbidden, _NEVER)


def penalize(logits: Tensor, present: Tensor, sampling: Sampling) -> Tensor:
    """Apply the repetition penalty (CTRL, arXiv 1909.05858), in fp32, to the tokens that `present` `[..., V]` marks."""
    factor = sampling.repetition_penalty
    if factor == 1:
        return logits
    logits = logits.float()
    return torch.where(present, torch.where(logits > 0, logits / factor, logits * factor), logits)


def nothing_left(logits: Tensor) -> Tensor:
    """Return where every token of `logits` `[..., V]` is forbidden, `[...]`."""
    return logits.amax(-1) == _NEVER


def _tokens_mask(tokens: list[int], vocab: int, device: torch.device) -> Tensor | None:
    """Return a mask that is True at `tokens`, `[V]`; None if there are none."""
    if not tokens:
        return None
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[tokens] = True
    return mask.to(device)


def _mark(marks: Tensor, tokens: Tensor, where: Tensor) -> Tensor:
    """Return `marks` `[B, Q, V]`, set to True at those `tokens` `[B, Q, N]` that `where` `[B, Q, N]` picks."""
    nowhere = marks.shape[-1]  # a column that is cut off again
    return torch.nn.functional.pad(marks, (0, 1)).scatter(2, tokens.masked_fill(~where, nowhere), True)[..., :-1]


def _last(recent: Tensor, tokens: Tensor, path: Tensor) -> Tensor:
    """Return the last W of `recent` `[B, Q, W]` and after them those `tokens` `[B, Q, N]` that the `path` marks."""
    width = recent.shape[-1]
    if not width:
        return recent
    whole, real = torch.cat([recent, tokens], 2), torch.cat([torch.ones_like(recent, dtype=torch.bool), path], 2)
    order = torch.arange(whole.shape[2], device=whole.device).masked_fill(~real, -1)
    return whole.gather(2, order.topk(width).indices.flip(2))


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution after temperature, top-k, top-p and min-p, `[..., V]` fp32 (fp64 stays)."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits if sampling.temperature == 1 else logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < kth, _NEVER)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = _nucleus(logits, sampling.top_p)
    probs = logits.softmax(-1)
    if sampling.min_p:
        probs = torch.where(probs >= sampling.min_p * probs.amax(-1, keepdim=True), probs, 0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches `top_p`."""
    ascending, order = logits.sort(dim=-1)
    outside = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    outside[..., -1] = False
    return logits.masked_fill(outside.scatter(-1, order, outside), _NEVER)


class Highest(NamedTuple):
    """The most probable token at each place, and its logit, `[...]` each."""

    token: Tensor
    logit: Tensor  # finite only if all logits of the place are numbers, and one of them is finite


def highest(logits: Tensor) -> Highest:
    """Return the first token with the highest logit of `[..., V]`, and that logit, in one reduction.

    `argmax` finds the same token, and takes three times as long on a CPU, as do numbers of 16 bits.
    """
    most = (logits if logits.is_cuda else logits.float()).max(-1)
    return Highest(most.indices, most.values)


def are_finite(values: list[Tensor]) -> Tensor:
    """Return for each row whether the numbers `[B, P]` are all finite, `[B]`.

    A single NaN or infinity among the logits of a place shows in its largest logit and in every probability of it, so a
    round looks at one number of each of P places.
    """
    together = values[0] if len(values) == 1 else torch.cat(values, 1)
    # The largest magnitude in a row with a NaN is NaN, and no comparison with NaN is true.
    return torch.linalg.vector_norm(together, float("inf"), dim=1) < float("inf")


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the token at which the cumulative distribution passes `uniform` `[...]`.

    `probs` `[..., V]` need not sum to 1. A token of probability 0 is never drawn.
    """
    cumulative = probs.double().cumsum(-1)
    # What is passed stays below the whole sum, so that no rounding steps past the last possible token.
    passed = uniform.double().clamp(max=_BELOW_ONE)[..., None] * cumulative[..., -1:]
    token = torch.searchsorted(cumulative, passed, right=True)[..., 0]
    return token.clamp(max=probs.shape[-1] - 1)  # of probabilities that are no numbers, or all 0


@dataclass(frozen=True)
class Keys:
    """The keys of every draw of a round, by which it depends on its place alone, whatever the batch."""

    seed: Seed
    sequences: Tensor  # which sequence each row is, [B]
    # The index in its sequence of the first token that the round adds, [B]: a token that is drafted again in a later
    # round is a new draw.
    first: Tensor


def gumbel(seed: Seed, stream: int, vocab: int, *keys: Tensor) -> Tensor:
    """Return Gumbel noise for every token at each place of the keys `[...]`, `[..., V]`."""
    tokens = torch.arange(vocab, device=keys[0].device)
    return -(-uniforms(seed, stream, *(key[..., None] for key in keys), tokens).log()).log()


def shared_gumbel(seed: Seed, sequences: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return the noise that target and drafter share under the coupled rule, by the place in the text, `[..., V]`."""
    return gumbel(seed, COUPLED, vocab, sequences, positions)


@dataclass(frozen=True)
class SamplerConfig:
    """How tokens are drawn from logits, by drafter and target alike."""

    sampling: Sampling
    processors: Processors | None  # for penalties and bans; None if there are none
    vocab: int
    undrafted: Tensor | None = None  # tokens that the target may write and a drafter never drafts, [U]; None for none

    def draftable(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        """Return a drafter's logits `[..., V']`, of the tokens `token_ids` `[V']`, in which no other can be drawn."""
        if self.undrafted is None:
            return logits
        ids = torch.arange(logits.shape[-1], device=logits.device) if token_ids is None else token_ids
        return logits.masked_fill(torch.isin(ids, self.undrafted), float("-inf"))


@dataclass(frozen=True)
class Draft:
    """A proposal on its way to the target."""

    proposal: Proposal
    # The distributions its tokens were drawn from: for a chain [B, N, V], for a tree at each place [B, 1 + N, V]; None
    # if they were not drawn.
    probs: Tensor | None = None
    # For each of the drafter's distributions a number that is finite only if its logits are, [B, …]; see `are_finite`.
    peaks: Sequence[Tensor] = ()


class NextToken(NamedTuple):
    """The next token of each row's chain."""

    token: Tensor  # [B]
    probs: Tensor | None  # the distribution it was drawn from, [B, V]; None if it was not drawn
    peak: Tensor | None  # where `probs` is None, a number that is finite only if the logits are, [B, 1]
    logits: Tensor  # what it was picked from, processed, [B, V or V']
    place: Tensor  # its index among them, [B]

    def probability(self) -> Tensor:
        """Return the probability that the drafter gives the token, `[B]`."""
        probs = self.logits.float().softmax(-1) if self.probs is None else self.probs
        return probs.gather(-1, self.place[:, None])[:, 0]


class Children(NamedTuple):
    """Different tokens after each of W nodes, best first."""

    tokens: Tensor  # [B, W, C]
    scores: Tensor  # the drafter's log-probabilities, [B, W, C]; −inf for a token that is not really there
    probs: Tensor | None  # the distributions they were drawn from, [B, W, V]; None if they were not drawn
    peaks: Tensor | None  # where `probs` is None, numbers that are finite only if the logits are, [B, W]


@dataclass(frozen=True)
class DraftSampler:
    """Picks draft tokens under the target's own processors and filters."""

    rule: Rule  # how the proposal will be verified; decides how tokens are picked
    config: SamplerConfig
    keys: Keys  # of every draw; `keys.first` is the first token drafted
    context: Context | None = None  # of that token, if there are processors

    def next_token(
        self, logits: Tensor, token_ids: Tensor | None, depth: int = 0, context: Context | None = None
    ) -> NextToken:
        """Pick the token of a chain that stands after `depth` drafts, from logits `[B, V']`.

        `context`: of that token, if there are processors.
        """
        logits = self._draftable(logits, token_ids)
        if self._is_certain and context is None:
            best = _highest(logits, logits)
            return best if token_ids is None else best._replace(token=token_ids.index_select(0, best.place))
        return self._pick(self._processed(logits[:, None], token_ids, context)[:, 0], depth)

    def _pick(self, logits: Tensor, depth: int) -> NextToken:
        if self._is_certain:
            return _highest(logits, logits)
        keys, probs = self.keys, probabilities(logits, self.config.sampling)
        positions = keys.first + depth
        if self.rule.pick is DraftPolicy.SHARED_NOISE:
            return _highest(probs.double().log() + self._shared_noise(keys.sequences, positions), logits)
        token = draw(probs, uniforms(keys.seed, DRAFT, keys.sequences, keys.first, positions))
        return NextToken(token, probs, None, logits, token)

    def children(
        self, logits: Tensor, token_ids: Tensor | None, count: int, depth: int, nodes: Tensor, context: Context | None
    ) -> Children:
        """Pick `count` different tokens after each of W nodes.

        Args:
            logits: `[B, W, V']`.
            depth: the children's.
            nodes: numbers of the nodes, by which draws differ, `[B or 1, W]`.
            context: the children's, `[B, W]` places, if there are processors.
        """
        logits = self._draftable(logits, token_ids, nodes.shape[-1])
        if not self._is_certain or context is not None:
            logits, token_ids = self._processed(logits, token_ids, context), None
        if self._is_certain:
            tokens, scores = _top(logits, count)
            return Children(tokens if token_ids is None else token_ids[tokens], scores, None, scores[:, :, 0])
        keys, probs = self.keys, probabilities(logits, self.config.sampling)
        log_probs = probs.double().log()
        rows = keys.sequences[:, None]
        first = keys.first[:, None]
        if self.rule.pick is DraftPolicy.SHARED_NOISE:
            drawn, peaks = None, probs[:, :, 0].clone()  # a view would keep the whole distribution
            noise = self._shared_noise(rows, first + depth - 1)
        else:
            # The largest of log q + Gumbel noise are draws without replacement, in order (arXiv 1903.06059).
            # `rules` weighs them as such, and `reference` draws them so a second time.
            drawn, peaks = probs, None
            noise = gumbel(keys.seed, DRAFT, self.config.vocab, rows, first, nodes)
        tokens = (log_probs + noise).topk(count, -1).indices
        return Children(tokens, log_probs.gather(-1, tokens), drawn, peaks)

    def _draftable(self, logits: Tensor, token_ids: Tensor | None, *nodes: int) -> Tensor:
        """Return a session's logits `[B, V']`, or `[B, W, V']` at W `nodes`, without what must not be drafted."""
        expected = (len(self.keys.sequences), *nodes, self.config.vocab if token_ids is None else len(token_ids))
        if tuple(logits.shape) != expected:
            raise IncompatibleError(
                f"the drafter's session returned logits of the shape {tuple(logits.shape)}, expected {expected}: rows, "
                "nodes of a tree, and the target's vocabulary, or as many as it has output_ids. Mend the session."
            )
        return self.config.draftable(logits, token_ids)

    @property
    def _is_certain(self) -> bool:
        return self.rule.pick is DraftPolicy.MOST_PROBABLE

    def _shared_noise(self, sequences: Tensor, positions: Tensor) -> Tensor:
        return shared_gumbel(self.keys.seed, sequences, positions, self.config.vocab)

    def _processed(self, logits: Tensor, token_ids: Tensor | None, context: Context | None) -> Tensor:
        """Return logits `[B, W, V']` over the whole vocabulary, `[B, W, V]`, after the processors."""
        logits, processors = logits.float(), self.config.processors
        if token_ids is not None:
            whole = logits.new_full((*logits.shape[:-1], self.config.vocab), float("-inf"))
            logits = whole.scatter(-1, token_ids.expand_as(logits), logits)
        if processors is None or context is None:
            return logits
        processed = processors(logits, context)
        # A pruned vocabulary may hold no token that is allowed here. What is drafted then is refused, but must be drawn
        # from what it is scored with.
        return torch.where(nothing_left(processed)[..., None], logits, processed)


def _highest(scores: Tensor, logits: Tensor) -> NextToken:
    """Return the token with the highest of the `scores` that were made of `logits`, `[B, V]` each."""
    best = highest(scores)
    return NextToken(best.token, None, best.logit[:, None], logits, best.token)


def _top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` most probable tokens and their log-probabilities, `[..., C]` each.

    The first is the one that argmax takes, as the target does: topk orders ties at will.
    """
    top, best = logits.float().log_softmax(-1).topk(count, -1), highest(logits).token[..., None]
    others = torch.where(top.indices == best, top.indices[..., :1], top.indices)[..., 1:]
    return torch.cat([best, others], -1), top.values
