"""One ragged batch whose rows each have an adapter of the target, and a drafter, of their own.

The target's weights stay as they are; to the products of each row peft adds those of its adapter (`adapter_names`). The
drafters, changes of one and the same, each have a session over the rows that are routed to them.

Shapes: B rows, Q tokens of one pass, W nodes read at once, V' the drafters' vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, cast

import torch
from peft import PeftConfig, PeftModel, set_peft_model_state_dict
from peft.tuners.lora import LoraConfig, LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn

from ..common import BadInputError, IncompatibleError
from ..decode import Decoder, Output, Plan, Sampling
from ..heads import Abilities, Drafter, DrafterConfig, NodeSession, load_drafter
from ..pair import Pair
from ..targets import Nodes, RaggedCache, RowLengths, Target
from ..targets.backbone import by_library
from ..targets.images import ImageInputs
from ..targets.peft_adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, fitting_adapter
from .fleet import OWN, read_routes

_BASE = "__base__"  # peft's name for no adapter
# Settings of a LoRA that change more than what single rows are multiplied by, or that peft does not add by rows.
_WHOLE = ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters")


class AdapterCache(RaggedCache):
    """A cache whose rows have adapters: `adapters`, by peft's names."""

    adapters: list[str]

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.adapters = [self.adapters[row] for row in rows]


class AdaptedTarget(Target):
    """A target with LoRA adapters beside its weights. It takes the place of `base`, whose model it changes.

    Attributes:
        rows: the adapter of each prompt of the batch that is begun next, None for the target itself.

    Raises:
        BadInputError, IncompatibleError: an adapter cannot be loaded or does not fit, as in `merge_adapter`; or peft
            cannot add it to single rows.
    """

    def __init__(self, base: Target, adapters: Mapping[str, Path]):
        layout = base.cache_layout()
        if layout.kinds is not None:
            raise IncompatibleError(f"{type(base.model).__name__} keeps states, which no cache with adapters holds.")
        fingerprint = base.fingerprint()
        self.names = {name: f"adapter_{number}" for number, name in enumerate(adapters)}  # a name may hold dots
        peft: PeftModel | None = None
        for name, place in adapters.items():
            folder, config = fitting_adapter(base.model, str(place))
            _require_rows(config, folder)
            if peft is None:
                peft = PeftModel(base.model, config, self.names[name])
            else:
                peft.add_adapter(self.names[name], config)
            ends = (base.model.get_input_embeddings(), base.model.get_output_embeddings())
            if any(isinstance(end, LoraLayer) for end in ends):  # drafters read these, too
                raise _not_of_rows("a change of the embeddings", folder)
            set_peft_model_state_dict(peft, load_file(folder / ADAPTER_WEIGHTS), self.names[name])
        super().__init__(base.model, base.tokenizer, base.source, lambda: fingerprint)
        self.rows: Sequence[str | None] = ()
        self._reads: list[str] | None = None  # the adapters of the rows of a pass that runs
        for module in self.model.modules():
            if isinstance(module, LoraLayer):
                module.register_forward_pre_hook(self._name_rows, with_kwargs=True)
        cast(nn.Module, self.model).to(base.device).eval().requires_grad_(False)

    @property
    def reads_in_parts(self) -> bool:
        """No: rows have adapters of their own, in the order in which they were named."""
        return False

    def new_cache(self, batch_size: int, max_length: int, joined: bool = False) -> RaggedCache:
        """Make a cache for the rows that are named; one of another size, for a measurement, is the target's alone."""
        shapes = self.cache_layout().shapes
        cache = AdapterCache(len(shapes), batch_size, max_length, self.device, shapes, joined)
        cache.adapters = [_BASE] * batch_size
        if batch_size == len(self.rows):
            cache.adapters = [_BASE if name is None else self.names[name] for name in self.rows]
        return cache

    def run(
        self,
        inputs: Tensor,  # [B, Q], or [B, Q, H]
        cache: RaggedCache | None = None,
        taps: Sequence[int] = (),
        offset: int = 0,
        nodes: Nodes | None = None,
        images: ImageInputs | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if cache is not None and cache.window is not None:
            raise ValueError("a pass of fixed shape is captured, with the adapters of other rows than it will have")
        self._reads = cache.adapters if isinstance(cache, AdapterCache) else None
        try:
            with by_library(self):  # other passes read the weights alone
                return super().run(inputs, cache, taps, offset, nodes, images)
        finally:
            self._reads = None

    def _name_rows(
        self, layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, object]
    ) -> tuple[tuple[Tensor, ...], dict[str, object]]:
        """Return the arguments of one of peft's layers, with the adapters of the rows `[B, Q, ·]` that it reads."""
        rows = inputs[0]
        if rows.ndim != 3:
            raise IncompatibleError(
                f"a {type(layer).__name__} reads {tuple(rows.shape)}, in which the rows of a batch are not told apart "
                "(experts do so); merge the adapters, and decode each by itself."
            )
        return inputs, named | {"adapter_names": self._reads or [_BASE] * len(rows)}


def _require_rows(config: PeftConfig, folder: Path) -> None:
    """Raise IncompatibleError for an adapter that peft cannot add to some rows of a batch."""
    found = [name for name in _WHOLE if getattr(config, name, None)]
    if not isinstance(config, LoraConfig):
        found = [f"peft_type {config.peft_type}"]
    elif config.bias != "none":
        found = [f"bias {config.bias}"]
    if found:
        raise _not_of_rows(found[0], folder)


def _not_of_rows(found: str, folder: Path) -> IncompatibleError:
    return IncompatibleError(
        f"{folder / ADAPTER_CONFIG}: {found} cannot be had by single rows of a batch; expected a LoRA of linear "
        "layers. Merge it, and decode it by itself."
    )


class RoutedDrafter(Drafter[DrafterConfig]):
    """Several drafters of one network in one batch: row b is drafted for by `rows[b]`."""

    name = "routed"
    config_class = DrafterConfig
    trainable = False

    def __init__(self, rows: Sequence[Drafter]):
        super().__init__(DrafterConfig())
        self.drafters = nn.ModuleList(dict.fromkeys(rows))
        self.rows: list[Drafter] = list(rows)
        first = rows[0]
        alike = all(
            each.name == first.name and each.taps == first.taps and _same(each.output_ids, first.output_ids)
            for each in rows
        )
        if not alike or not first.abilities.reads_nodes or first.needs_layers:
            raise IncompatibleError(
                f"the drafters of one batch ({first.name} first): expected models of one kind with the same taps and "
                "outputs, which run no layers of the target."
            )

    def check(self, target: Target) -> None:
        for drafter in self.drafters:
            cast(Drafter, drafter).check(target)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.rows[0].taps

    @property
    def max_depth(self) -> int | None:
        return self.rows[0].max_depth

    @property
    def abilities(self) -> Abilities:
        return Abilities(reads_nodes=True)

    @property
    def output_ids(self) -> Tensor | None:
        return self.rows[0].output_ids

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> RoutedSession:
        asked = self.rows if batch_size == len(self.rows) else [self.rows[0]] * batch_size  # else for a measurement
        parts = []
        for drafter in dict.fromkeys(asked):
            rows = [row for row, own in enumerate(asked) if own is drafter]
            parts.append((cast(NodeSession, drafter.open(target, len(rows), max_length, spare)), rows))
        return RoutedSession(parts)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return sum(drafter.state_bytes(target, 1, max_length, spare) for drafter in self.rows)


class RoutedSession(NodeSession):
    """The sessions of several drafters, each with the rows of the batch that it drafts for."""

    def __init__(self, parts: list[tuple[NodeSession, list[int]]]):
        super().__init__(parts[0][0].output_ids)
        self.parts = parts

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        for session, rows in self.parts:
            own = [None if part is None else part[rows] for part in (hidden, path)]
            session.update(tokens[rows], own[0], counts.select(rows), own[1])

    def prefill(self, root: Tensor) -> Tensor:
        for session, _ in self.parts:
            session.round_depth = self.round_depth
        return self._joined(lambda session, rows: session.prefill(root[rows]))

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return self._joined(
            lambda session, rows: session.decode(tokens[rows], None if parents is None else parents[rows])
        )

    def _joined(self, answer: Callable[[NodeSession, list[int]], Tensor]) -> Tensor:
        """Return the sessions' logits `[B, …]` in the order of the batch."""
        logits = torch.cat([answer(session, rows) for session, rows in self.parts])
        order = torch.tensor([row for _, rows in self.parts for row in rows], device=logits.device)
        return torch.empty_like(logits).index_copy_(0, order, logits)

    def select(self, rows: list[int]) -> None:
        places = {row: place for place, row in enumerate(rows)}
        parts = []
        for session, own in self.parts:
            if kept := [index for index, row in enumerate(own) if row in places]:
                session.select(kept)
                parts.append((session, [places[own[index]] for index in kept]))
        self.parts = parts


class AdapterDecoder:
    """A decoder that is given an adapter with each prompt, and takes the drafter to which that is routed.

    Args:
        drafters: of adapters; the others, and the target itself, are drafted for by `own`.
    """

    def __init__(self, target: AdaptedTarget, own: Drafter, drafters: Mapping[str, Drafter]):
        self.target = target
        self.own = own
        self.drafters = drafters

    @classmethod
    def of_fleet(cls, pair: Pair, folder: Path, adapters: Mapping[str, Path]) -> Self:
        """Return a decoder of a pair's target with these adapters, by the routes of the fleet in `folder`."""
        routes = read_routes(folder)
        base, own, _ = pair.open()
        of_group = {group.leader: load_drafter(folder / group.drafter, base) for group in routes.groups}
        drafters = {route.adapter: of_group[route.drafter] for route in routes.routes if route.drafter != OWN}
        return cls(AdaptedTarget(base, adapters), own, drafters)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        adapters: Sequence[str | None],
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        plan: Plan | None = None,
        ignore_eos: bool = False,
        speculate: bool = True,
    ) -> Output:
        """Complete all prompts in one batch, each by the target with its own adapter; None is the target itself.

        The other arguments are those of `Decoder.generate`.

        Raises BadInputError for an adapter that was not loaded, or another number of them than of prompts.
        """
        unknown = [name for name in adapters if name is not None and name not in self.target.names]
        if unknown or len(adapters) != len(prompts):
            found = f"adapter {unknown[0]!r}" if unknown else f"{len(adapters)} adapters for {len(prompts)} prompts"
            known = ", ".join(self.target.names)
            raise BadInputError(f"found {found}; expected one of {known}, or None, for each prompt.")
        self.target.rows = adapters
        drafter = RoutedDrafter([self.drafters.get(name or "", self.own) for name in adapters])
        decoder = Decoder(self.target, drafter, static=False, fast=False)
        return decoder.generate(prompts, max_new_tokens, sampling, plan, ignore_eos=ignore_eos, speculate=speculate)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
