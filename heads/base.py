"""What a drafter is: the contract between heads/, the trainer and the decoder.

Shapes: B rows, T tokens, Q tokens of one pass, k draft tokens, K taps, H target hidden size, V target vocabulary,
V' the drafter's own vocabulary (V' <= V when it is pruned).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

import torch
from torch import Tensor, nn

from ..ground import BadInputError, IncompatibleError, refuse_unknown_keys
from ..ground.values import checked_value
from ..targets import Counts, Nodes, RaggedCache, Target

WEIGHTS, CONFIG = "model.safetensors", "config.json"

# Picks the draft token of each row from the drafter's logits: (logits [B, V'], token_ids [V'] or None) -> target ids [B].
# The decoder supplies it: temperature, filters and penalties are applied there, once, for drafter and target alike.
Choose = Callable[[Tensor, Tensor | None], Tensor]


def weight_versions(weights: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Changes when any of the weights is moved or written to. (Those made in inference mode are not counted by torch: only their place is.)"""
    return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]


def draft_vocabulary(size: int, vocab_size: int, token_counts: Tensor | None, name: str) -> Tensor:
    """Target ids of a draft vocabulary, ascending, `[size]`: all tokens, or the most frequent ones. `name`: of the drafter, for the errors."""
    if size > vocab_size:
        raise BadInputError(f"{name}: draft_vocab_size {size} exceeds the target's vocabulary of {vocab_size}.")
    return torch.arange(size) if size == vocab_size else most_frequent(token_counts, size, name)


def most_frequent(token_counts: Tensor | None, size: int, name: str) -> Tensor:
    """The `size` tokens with the highest counts `[V]`, ascending, `[size]`: a pruned draft vocabulary. `name`: of the drafter, for the error."""
    if token_counts is None:
        raise BadInputError(f"{name}: a pruned draft vocabulary needs token counts of the training data.")
    return by_frequency(token_counts)[:size].sort().values


def by_frequency(token_counts: Tensor) -> Tensor:
    """All tokens by their counts `[V]`, the most frequent first; of equally frequent ones the lower id first, `[V]`."""
    return token_counts.cpu().argsort(descending=True, stable=True)


def joined(before: Tensor, counts: Counts, after: Tensor) -> Tensor:
    """The first `counts` entries of each row of `before` `[B, P, ...]`, and behind them `after` `[B, Q, ...]`: `[B, P' + Q, ...]`; the rest means nothing."""
    before = before[:, : max(counts.values)]
    both = torch.cat([before, after], 1)
    if min(counts.values) == before.shape[1]:
        return both
    index = torch.arange(both.shape[1], device=both.device).expand(len(both), -1)
    index = torch.where(index < counts.tensor[:, None], index, index - counts.tensor[:, None] + before.shape[1]).clamp(
        max=both.shape[1] - 1
    )
    return both.gather(1, index.view(*index.shape, *[1] * (both.dim() - 2)).expand_as(both))


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """`x` `[B, T, H]` at indices `[B or 1, T']`, the nearest one where they leave it: `[B, T', H]`."""
    index = index.clamp(0, x.shape[1] - 1)
    return x.gather(1, index[:, :, None].expand(len(x), -1, x.shape[2]))


class Branches:
    """The drafted nodes that a drafter has read in this round, in the order of reading: where each stands and whom it sees.

    Args:
        before: uncommitted entries of the drafter's cache that lie before the nodes; all nodes see them.
    """

    def __init__(self, rows: int, before: int, device: torch.device | str):
        # Index 0 is the root, node i is index i + 1.
        self._depths = torch.full((rows, 1), before - 1, device=device)  # [B, 1 + n]
        self._sees = torch.ones(rows, 1, before, dtype=torch.bool, device=device)  # [B, 1 + n, before + n]

    def grow(self, parents: Tensor) -> Nodes:
        """Add nodes below the nodes `parents` `[B, W]` (−1: the root); returns their places for the pass that reads them."""
        own = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device)
        return self._add(self._depths.gather(1, parents + 1) + 1, parents, own)

    def grow_chain(self, after: Tensor, length: int) -> Nodes:
        """Add a chain of `length` nodes, whose first stands below the node `after` `[B]` (−1: the root)."""
        own = torch.ones(length, length, dtype=torch.bool, device=after.device).tril()
        depths = self._depths.gather(1, after[:, None] + 1) + 1 + torch.arange(length, device=after.device)
        return self._add(depths, after[:, None].expand(-1, length), own)

    def _add(self, depths: Tensor, below: Tensor, own: Tensor) -> Nodes:
        """Nodes at `depths` `[B, W]` that see what the nodes `below` `[B, W]` see, and each other as `own` `[W, W]` says."""
        rows, width = depths.shape
        inherited = self._sees.gather(1, (below + 1)[:, :, None].expand(-1, -1, self._sees.shape[2]))
        sees = torch.cat([inherited, own.expand(rows, -1, -1)], 2)
        self._depths = torch.cat([self._depths, depths], 1)
        self._sees = torch.cat([nn.functional.pad(self._sees, (0, width)), sees], 1)
        return Nodes(depths, sees)


@dataclass
class DrafterConfig:
    """Settings of a drafter; saved as config.json beside its weights.

    `init_words`: what its setting `init` may be; a recipe's `init` that is none of them is the folder of a saved drafter.
    """

    init_words: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "drafter") -> DrafterConfig:
        """Build from a mapping of plain values. All numbers are sizes, counts or weights.

        Raises:
            BadInputError: an unknown key (the nearest known one is suggested), a value of another type than its field's, or a negative number.
        """
        refuse_unknown_keys(values, [f.name for f in fields(cls)], where)
        hints = get_type_hints(cls)
        checked = {name: checked_value(f"{where}.{name}", value, hints[name]) for name, value in values.items()}
        for name, value in checked.items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise BadInputError(f"{where}.{name}: expected 0 or more, found {value}.")
        return cls(**checked)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json_string(self) -> str:
        """As in `transformers`, whose tensorboard report asks for it."""
        return json.dumps(self.to_dict(), indent=2)


@dataclass
class TargetBatch:
    """What a drafter learns from: sequences, and what the target made of them.

    Attributes:
        target: gives `embed` and `lm_head`; never trained.
        tokens: `[B, T]`, padded on the right.
        supervised: `[B, T]` bool, True at the tokens a drafter should learn to predict (the target's own responses).
        hidden: the drafter's taps, `[B, T, K, H]`; None for drafters without taps.
        last: the target's last hidden state, `[B, T, H]`; `target.lm_head(last)` are its logits.
    """

    target: Target
    tokens: Tensor
    supervised: Tensor
    hidden: Tensor | None
    last: Tensor


Sum = tuple[Tensor, Tensor]  # (sum, count): divided once, after everything was added up


@dataclass
class DrafterLoss:
    """A loss as a sum over supervised positions, so that accumulation and data parallelism reduce it right.

    Attributes:
        total: differentiable sum over positions (depth weights included).
        count: number of supervised positions in the batch.
        metrics: (sum, count) per name: `loss_d1`, `top1_d1`, `alpha_d1`, …, `tau`.
    """

    total: Tensor
    count: Tensor
    metrics: dict[str, Sum] = field(default_factory=dict)

    @property
    def mean(self) -> Tensor:
        return self.total / self.count.clamp(min=1)


@dataclass
class Proposal:
    """Draft tokens for one round: a chain, or a tree.

    Attributes:
        tokens: `[B, N]`.
        real: which of them each row really proposes, `[B, N]`; none of them behind one that is not.
        depth: of the deepest node; a chain's is N.
        parents: of a tree, index of each token's parent, before it, −1 for the root (the last committed token), `[B, N]`. None for a chain.
        read: of a tree, when `extend` has read each token, −1 if it has not, `[B, N]`.
        deterministic: True if the tokens are not samples (so that there is no distribution q to score them with).
    """

    tokens: Tensor
    real: Tensor
    depth: int
    parents: Tensor | None = None
    read: Tensor | None = None
    deterministic: bool = False

    @classmethod
    def chain(cls, tokens: Tensor, lengths: Tensor | None = None, deterministic: bool = False) -> Proposal:
        """Tokens `[B, k]`, of which row b proposes the first `lengths[b]` (None: all)."""
        real = (
            torch.ones_like(tokens, dtype=torch.bool)
            if lengths is None
            else torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        )
        return cls(tokens, real, tokens.shape[1], deterministic=deterministic)

    @classmethod
    def tree(cls, tokens: Tensor, parents: Tensor, real: Tensor, read: Tensor, depth: int) -> Proposal:
        return cls(tokens, real, depth, parents, read)

    @cached_property
    def lengths(self) -> Tensor:
        """How many tokens each row really proposes, all nodes of a tree, `[B]`."""
        return self.real.sum(1)

    @cached_property
    def nodes(self) -> Nodes:
        """Places of root and tokens, `[B, 1 + N]`; of a chain one row for all."""
        if self.parents is None:
            return Nodes.of_chain(self.depth, self.tokens.device)
        return Nodes.of_tree(self.parents, self.depth)


D = TypeVar("D", bound="Drafter")


class Drafter(nn.Module):
    """Proposes tokens; the target verifies them.

    Decoding, per batch: `open` (and `lend`), then `absorb` once for the prompts, then per round `propose` (or `begin` and `extend`) and `absorb`.
    Training: `loss`, called by the trainer as `forward`.

    `deterministic`: its proposals are never samples, so `choose` gives the most probable tokens at any temperature.
    `observes`: it wants to know what the target made of all that it proposed: see `observe`.
    `writes_text`: it is a whole language model, which needs no target to write: see `writer`.
    `trains_target`: its loss may train the hidden states that it reads, so that the target learns with it (train/joint.py).
    """

    name: ClassVar[str]
    config_class: ClassVar[type[DrafterConfig]] = DrafterConfig
    trainable: ClassVar[bool] = True
    deterministic: ClassVar[bool] = False
    observes: ClassVar[bool] = False
    writes_text: ClassVar[bool] = False
    trains_target: ClassVar[bool] = False

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config

    @property
    def taps(self) -> tuple[int, ...]:
        """HF `hidden_states` indices that `absorb` and `loss` want; () for none."""
        return ()

    @property
    def max_depth(self) -> int | None:
        """The deepest it drafts; None for as deep as anyone asks. The decoder cuts deeper plans down to it."""
        return None

    def max_nodes(self, depth: int) -> int:
        """Most draft tokens of a proposal that it makes itself (`propose`), up to this depth."""
        return depth

    # ------------------------------------------------------------ making

    @classmethod
    def build(cls: type[D], config: DrafterConfig, target: Target, token_counts: Tensor | None = None) -> D:
        """A new, untrained drafter for `target`. `token_counts` `[V]`: how often each token occurs in the training data."""
        raise NotImplementedError

    @classmethod
    def from_folder(cls, folder: Path, values: dict[str, Any], target: Target | None) -> Drafter:
        """Restore what `save` wrote; `values` is config.json without `drafter_type`."""
        drafter = cls(cls.config_class.from_dict(values, f"{folder / CONFIG}: drafter"))
        load_weights(drafter, folder)
        return drafter

    @classmethod
    def load(cls, path: str | Path, target: Target | None = None) -> Drafter:
        """Load any saved drafter; which class is read from its config.json."""
        from . import load_drafter

        return load_drafter(path, target)

    def save(self, path: str | Path) -> None:
        """Write config.json and model.safetensors into the folder `path`."""
        from safetensors.torch import save_file

        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps({"drafter_type": self.name, **self.config.to_dict()}, indent=2) + "\n")

    def cast(self, dtype: torch.dtype) -> Drafter:
        """Its parameters in `dtype`. Unlike `to`, this leaves buffers alone: rotary frequencies lose their angles in less than fp32."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def check(self, target: Target) -> None:
        """Raise IncompatibleError if this drafter cannot draft for `target`."""
        target.check_taps(self.taps)

    # ------------------------------------------------------------ training

    def writer(self) -> Target:
        """What it writes text with when it is alone, as a model that decodes plainly; only where `writes_text`. On-policy training learns from that text."""
        raise NotImplementedError(f"{self.name} writes no text of its own")

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        raise NotImplementedError(f"{self.name} has nothing to train")

    def forward(self, batch: TargetBatch) -> DrafterLoss:
        return self.loss(batch)

    # ------------------------------------------------------------ decoding

    def open(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> Any:
        """State for decoding `batch_size` sequences of up to `max_length` tokens, one round's drafts included.

        `spare`: how many nodes of a tree are read beside those of its longest path.
        """
        raise NotImplementedError

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        """What `open` allocates for this; the decoder asks before anything is allocated."""
        return 0

    def lend(self, state: Any, cache: RaggedCache) -> None:
        """Use the target's own `cache` of the same rows, if that is of use; called once, behind `open`, where there is one.

        Whoever lends keeps it: it holds all committed tokens before each `begin`. A drafter may read its entries, and write behind them, at most
        the root and the nodes that it reads: the verification writes there again.
        """

    def absorb(
        self, state: Any, tokens: Tensor, hidden: Tensor | None, counts: Counts, path: Tensor | None = None
    ) -> None:
        """Take note of what the target has processed. After rounds without drafts this is called several times before the next `begin`.
        After rounds in which another drafter proposed, too: then with more than the root.

        Args:
            tokens: `[B, Q]`, the tokens of the target's last pass in the order of the text; row b keeps the first `counts.values[b]`.
            hidden: their true tapped hidden states, `[B, Q, K, H]`.
            counts: per row, at least 1.
            path: after a tree, which of the nodes that `extend` has read the tokens behind the first are, `[B, Q − 1]`; −1 for one
                that it has not read. None after a chain.
        """
        raise NotImplementedError

    def observe(self, state: Any, following: Tensor) -> None:
        """Take note of the target's most probable token behind the root and each token of the last proposal, kept or not, `[B, 1 + N]`.

        Called before `absorb`, only where `observes`.
        """
        raise NotImplementedError

    def propose(
        self, state: Any, root: Tensor, depth: int, choose: Choose, ended: Callable[[], bool] | None = None
    ) -> Proposal:
        """Draft a chain of up to `depth` tokens after `root` `[B]`, the last committed token, which the target has not processed yet.

        `ended`: asked behind each token; True ends the chain there, for all rows.
        """
        depth = min(depth, self.max_depth or depth)
        drafted = [choose(self.begin(state, root), self.output_ids)]
        while len(drafted) < depth and not (ended is not None and ended()):
            logits = self.extend(state, drafted[-1][:, None])
            drafted.append(choose(logits[:, 0], self.output_ids))
        return Proposal.chain(torch.stack(drafted, 1))

    # The two steps of every drafter that is a model; `propose` is a loop over them, and so is a tree.

    @property
    def grows(self) -> bool:
        """Whether trees can be grown with it."""
        return type(self).begin is not Drafter.begin

    @property
    def output_ids(self) -> Tensor | None:
        """Target ids of its logits, `[V']`; None where they are the whole vocabulary."""
        return None

    def begin(self, state: Any, root: Tensor) -> Tensor:
        """Read what was absorbed and `root` `[B]`; logits of the first draft, `[B, V']`."""
        raise NotImplementedError

    def extend(self, state: Any, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Read the drafted `tokens` `[B, W]`; logits behind each of them, `[B, W, V']`.

        Args:
            parents: `[B, W]`, indices of nodes that were read before, in the order of reading; −1 is the root. None: a chain, in
                which this one node follows the last.
        """
        raise NotImplementedError

    # Two steps that let one drafter draft for another (heads/cascade.py).

    @property
    def reads_chains(self) -> bool:
        """Whether it can read tokens that it has not chosen yet: not where what it reads next is its own output."""
        return type(self).read_chain is not Drafter.read_chain

    def read_chain(self, state: Any, tokens: Tensor, after: Tensor | None = None) -> Tensor:
        """Read the chain `tokens` `[B, W]` in one pass; logits behind each of them, `[B, W, V']`. In place of `begin` and `extend`.

        Args:
            after: the node that each row's chain follows, in the order of reading, −1 for the root, `[B]`. None begins a round: the
                first of `tokens` is the root, and the nodes count from the second.
        """
        raise NotImplementedError

    def forget(self, state: Any) -> None:
        """Nothing was read in this round: the next `absorb` brings all that is kept. With `read_chain`."""
        raise NotImplementedError

    @property
    def continues(self) -> bool:
        """Whether it can say how texts go on that the target has not seen: drafters without weights that propose chains."""
        return type(self).continuations is not Drafter.continuations

    def continuations(self, state: Any, tails: list[list[int]], depth: int) -> list[list[int]]:
        """What it would propose if each row's text went on with its tail, root first: up to `depth` tokens each."""
        raise NotImplementedError

    # What rounds of fixed shapes need (decode/static.py): a drafter that is a model, and reads nothing back to the host, has them.

    def caches(self, state: Any) -> list[RaggedCache]:
        """Its caches; [] for a drafter without."""
        return []

    def carried(self, state: Any) -> list[Tensor]:
        """What `absorb` leaves for the next `begin`, caches apart."""
        raise NotImplementedError

    def carry(self, state: Any, tensors: list[Tensor]) -> None:
        """Put it back, from other places in memory."""
        raise NotImplementedError

    def reset(self, state: Any) -> None:
        """Make the state as `open` left it, in the same memory."""
        for cache in self.caches(state):
            cache.reset()

    def select(self, state: Any, rows: list[int]) -> None:
        """Keep only these rows of the state, in this order (sequences finish at different times)."""
        raise NotImplementedError


def read_config(path: str | Path) -> dict[str, Any]:
    """The config.json of a saved drafter."""
    file = Path(path) / CONFIG
    if not file.exists():
        raise BadInputError(f"no drafter at {str(path)!r}: {CONFIG} is missing there.")
    try:
        return dict(json.loads(file.read_text()))
    except json.JSONDecodeError as error:
        raise BadInputError(f"{file}: not valid JSON ({error}).") from error


def load_weights(module: nn.Module, folder: Path) -> None:
    """Fill `module` from model.safetensors, strictly: no missing, no unexpected names, equal shapes."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from ..targets.target import refuse_pickles

    refuse_pickles(folder)
    try:
        weights = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise BadInputError(
            f"{folder / WEIGHTS}: damaged or not a safetensors file ({error}). Copy it again, or take the last good checkpoint."
        ) from error
    own = module.state_dict()
    problems = [f"missing {n}" for n in own.keys() - weights.keys()] + [
        f"unexpected {n}" for n in weights.keys() - own.keys()
    ]
    problems += [
        f"{n} is {tuple(weights[n].shape)}, expected {tuple(own[n].shape)}"
        for n in own.keys() & weights.keys()
        if own[n].shape != weights[n].shape
    ]
    if problems:
        raise IncompatibleError(f"{folder / WEIGHTS} does not fit its config.json: {'; '.join(sorted(problems)[:4])}.")
    module.load_state_dict(weights)
