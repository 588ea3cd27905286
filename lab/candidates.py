"""A candidate head: factors of low rank find the tokens that an EAGLE head's output embedding then scores (EAGLE-4).

The output embedding W is most of what a draft step reads. Here S (D h) picks the N tokens that are most probable by it,
their logits are those of W's own rows, and no other token is drafted: another distribution q, to which every
verification rule is as exact as to any (github.com/eagle-hq/EAGLE-4).

The factors are fitted after the head, to the hidden states h of real drafting, in closed form. With C = E[h hᵀ], W less
the mean row that its probabilities p give (softmax does not see it) and P = diag(p), U are the first r eigenvectors of
C^½ Wᵀ P W C^½, and S = W C^½ U, D = Uᵀ C^−½: the least mean square of the logits' errors, weighted by p. NeMo AutoModel
begins with the singular vectors of W alone, and trains.

Shapes: B rows, Q nodes, N candidates, r rank, H hidden size, V' draft vocabulary, T hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from ..common import BadInputError, IncompatibleError
from ..decode import Decoder, Plan
from ..eval.measure import Contestant, measure
from ..eval.reports.figures import Interval, speed_ratio, tau_ratio
from ..eval.suites import Suite, make_jobs
from ..eval.summary import bootstrap_of
from ..heads import Drafter, DrafterConfig, drafter_config
from ..heads.eagle import Eagle1, Eagle3, FeatureConfig, FeatureDrafter, FeatureSession
from ..heads.session import Abilities
from ..recipes import EvalSpec
from ..targets import RaggedCache, Target

_HEADS = (Eagle1, Eagle3)  # and no class that is made of them
_AT_ONCE = 16  # prompts that are answered in one batch
_CHUNK = 256  # hidden states whose logits exist at a time
_LEAST = 1e-6  # of the largest variance of a hidden state's directions: those with less count as so much


@dataclass
class CandidatesConfig(DrafterConfig):
    """Settings of a candidate head.

    Attributes:
        head: type and settings of the EAGLE head whose output embedding it reads.
        rank: r, of the factors.
        num_candidates: N, the tokens of a draft's distribution.
    """

    least: ClassVar = {"rank": 1, "num_candidates": 1}

    head: dict[str, Any] = field(default_factory=dict)
    rank: int = 64
    num_candidates: int = 64


class CandidateHead(Drafter[CandidatesConfig]):
    """An EAGLE head that drafts among candidates.

    Args:
        head: the head itself; None for a new one of the config's settings.
    """

    name = "candidates"
    config_class = CandidatesConfig
    trainable = False  # by recipes: its head is trained before

    def __init__(self, config: CandidatesConfig, head: FeatureDrafter | None = None):
        super().__init__(config)
        kind, settings = drafter_config(config.head, "candidates.head")
        if kind not in _HEADS:
            raise BadInputError(f"candidates: the head must be an eagle1 or an eagle3 drafter, found {kind.name!r}.")
        self.head = head or cast(type[FeatureDrafter], kind)(cast(FeatureConfig, settings))
        outputs, size = self.head.config.draft_vocab_size, self.head.config.hidden_size
        for name, most in (("num_candidates", outputs), ("rank", size)):
            if (value := getattr(config, name)) > most:
                raise BadInputError(f"candidates: {name} {value} exceeds the head's {most}.")
        self.down = nn.Linear(size, config.rank, bias=False)
        self.scores = nn.Linear(config.rank, outputs, bias=False)

    @classmethod
    def over(cls, head: Drafter, rank: int, num_candidates: int) -> Self:
        """Return a trained head with factors that are still to be fitted, see `fit`."""
        values = head.config.to_dict().items()
        settings = {name: list(v) if isinstance(v, tuple) else v for name, v in values}  # as a file holds them
        config = CandidatesConfig({"type": head.name, **settings}, rank, num_candidates)
        return cls(config, cast(FeatureDrafter, head)).to(next(head.parameters()))

    def check(self, target: Target) -> None:
        self.head.check(target)
        if isinstance(self.head, Eagle1) and target.model.get_output_embeddings().bias is not None:
            raise IncompatibleError("candidates: this target's output embedding has a bias; draft with the head alone.")

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.taps

    @property
    def abilities(self) -> Abilities:
        return self.head.abilities

    @property
    def output_ids(self) -> Tensor | None:
        return self.head.output_ids

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return self.head.state_bytes(target, batch_size, max_length, spare)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> FeatureSession:
        session = cast(FeatureSession, self.head.open(target, batch_size, max_length, spare, cache))
        session.embed_output = self.output_of(target)
        return session

    def table(self, target: Target) -> tuple[Tensor, Tensor | None]:
        """Return the head's output embedding `[·, H]`, and which of its rows are outputs, `[V']`; None for all."""
        if isinstance(self.head, Eagle3):
            return self.head.lm_head.weight, None
        return target.model.get_output_embeddings().weight, self.output_ids

    def output_of(self, target: Target) -> Callable[[Tensor], Tensor]:
        """Return what gives draft logits `[B, Q, V']` of states `[B, Q, H]`: −inf but for each state's candidates."""
        table, ids = self.table(target)
        shared = isinstance(self.head, Eagle1)

        def embed_output(finished: Tensor) -> Tensor:
            found = self.scores(self.down(finished)).topk(self.config.num_candidates, -1, sorted=False).indices
            rows = table[found if ids is None else ids[found]]  # [B, Q, N, H]
            logits = (rows @ finished.to(rows.dtype)[..., None])[..., 0]
            logits = target.scale(logits) if shared else logits
            nowhere = logits.new_full((*found.shape[:-1], self.scores.out_features), float("-inf"))
            return nowhere.scatter(-1, found, logits)

        return embed_output


class _Recorder(CandidateHead):
    """A head that drafts alone, and keeps the states that its output embedding reads."""

    states: list[Tensor]

    def packed_as(self, target: Target) -> Self:
        return self  # a copy would keep them elsewhere

    def output_of(self, target: Target) -> Callable[[Tensor], Tensor]:
        own = self.head.output_of(target)

        def embed_output(finished: Tensor) -> Tensor:
            self.states.append(finished.flatten(0, -2).clone())
            return own(finished)

        return embed_output


def states_of(head: Drafter, target: Target, prompts: Sequence[Sequence[int]], length: int, plan: Plan) -> Tensor:
    """Return the states that a head's output embedding reads, `[T, H]`, while it drafts answers of `length` tokens."""
    recorder = _Recorder.over(head, 1, 1)
    recorder.states = []
    for start in range(0, len(prompts), _AT_ONCE):
        Decoder(target, recorder, static=False).generate(prompts[start : start + _AT_ONCE], length, plan=plan)
    return torch.cat(recorder.states).clone()  # outside of inference mode


@torch.no_grad()
def fit(drafter: CandidateHead, target: Target, states: Tensor) -> None:
    """Set the factors in closed form, by the states `[T, H]` that the output embedding reads, in float64."""
    table, ids = drafter.table(target)
    rows, known = (table if ids is None else table[ids]).double(), states.double()
    shares = torch.zeros_like(rows[:, 0])
    for part in states.split(_CHUNK):
        shares += _logits(drafter, target, part).softmax(-1).double().sum(0)
    shares = (shares / len(states) + 1 / len(rows)) / 2  # tokens that were never probable count a little, too
    mean = shares @ rows
    values, directions = torch.linalg.eigh(known.T @ known / len(known))
    values = values.clamp(min=_LEAST * float(values[-1]))
    root, inverse = ((directions * values**power) @ directions.T for power in (0.5, -0.5))
    gram = rows.T @ (shares[:, None] * rows) - mean[:, None] * mean
    first = torch.linalg.eigh(root @ gram @ root).eigenvectors[:, -drafter.config.rank :]
    drafter.down.weight.copy_(first.T @ inverse)
    drafter.scores.weight.copy_((rows - mean) @ (root @ first))


@torch.no_grad()
def recall(drafter: CandidateHead, target: Target, states: Tensor) -> tuple[float, float]:
    """Return how often the head's most probable token is a candidate, and the probability of all candidates."""
    best, mass = 0.0, 0.0
    for part in states.split(_CHUNK):
        logits = _logits(drafter, target, part)
        there = drafter.output_of(target)(part[None])[0] > float("-inf")
        best += float(there.gather(1, logits.argmax(-1, keepdim=True)).sum())
        mass += float((logits.softmax(-1) * there).sum())
    return best / len(states), mass / len(states)


def _logits(drafter: CandidateHead, target: Target, states: Tensor) -> Tensor:
    """Return the head's own logits `[T, V']` of states `[T, H]`."""
    return drafter.head.embed_output(states, target).float()


@dataclass(frozen=True)
class CandidateFigures:
    """What candidates cost and save, on prompts that they were not fitted to.

    Attributes:
        argmax: the share of drafts whose most probable token is a candidate. mass: the candidates' mean probability.
        tau: of the head alone, and among candidates. speed: tokens/s among candidates divided by the head's alone.
    """

    temperature: float
    argmax: float
    mass: float
    tau: tuple[Interval, Interval]
    speed: Interval


def figures(
    drafter: CandidateHead, target: Target, plan: Plan, suites: Sequence[Suite], settings: EvalSpec
) -> CandidateFigures:
    """Measure a head alone and among candidates, in turns, at the settings' first temperature."""
    temperature = settings.temperatures[0]
    settings = settings.model_copy(update={"temperatures": [temperature], "batch_sizes": []})
    own, among = (Contestant.of(d.name, d, plan) for d in (drafter.head, drafter))
    report = measure(target, [own, among], suites, settings, generate_baseline=False)
    alone, found = (report.records_of(c.name, temperature) for c in (own, among))
    bootstrap = bootstrap_of(alone, settings.seed)
    prompts = [job.prompt.tokens for job in make_jobs(suites, settings.limit)]
    argmax, mass = recall(drafter, target, states_of(drafter.head, target, prompts, settings.max_new_tokens, plan))
    return CandidateFigures(
        temperature=temperature,
        argmax=argmax,
        mass=mass,
        tau=(bootstrap.ratio(tau_ratio(alone)), bootstrap.ratio(tau_ratio(found))),
        speed=bootstrap.quotient(speed_ratio(found), speed_ratio(alone)),
    )
