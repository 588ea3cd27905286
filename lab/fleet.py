"""A fleet: one target, many adapters of it, and the few drafters that serve them all.

Every adapter's target answers the pair's calibration prompts with the pair's own drafter, as in a probe. Of those that
lose τ the one that loses most leads a group: a low-rank change of the drafter is learnt from its answers. All that lose
try this drafter, and the one that still loses most leads the next group. In the end each adapter is routed to the
drafter with which it has the largest τ; to another than the pair's own only where that is certain.

What can be seen without merging is refused before the first probe. Killed at any moment, the same call goes on from
what is there.

folder/asked.json               the settings
folder/tried/ADAPTER/LEADER.json    what was counted on an adapter's target with a drafter; `_own.json` with the pair's
folder/groups/LEADER/drafter/   learnt for a leader, as a refresh learns (`pair.refresh`)
folder/routes.json              the result, written last
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.errors import reason
from ..common.locks import locked
from ..common.places import require_new, require_outside
from ..common.untrusted_files import read_json, read_text
from ..common.values import ForeignModel
from ..eval.reports.figures import Interval
from ..heads import LowRank, load_drafter
from ..pair import Pair
from ..pair.calibration import calibrate
from ..pair.manifest import Figure, ProbeBaseline, PromptMeasure
from ..pair.probing import TOLERANCE, tau_change, tau_of
from ..pair.refresh import RefreshOptions, refresh_recipe, refreshed_drafter
from ..targets import Target
from ..targets.fingerprint import digest_file, digest_files, digest_json
from ..targets.peft_adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, fitting_adapter
from ..train.check import check, check_with_target

OWN = "_own"  # the pair's own drafter
ASKED, ROUTES = "asked.json", "routes.json"


@dataclass(frozen=True)
class FleetOptions:
    """How a fleet is served.

    Attributes:
        rank: of a group's change. most: groups. seconds: of training each; None for the steps of a refresh.
        tolerance: share of τ that an adapter may lose without a drafter of another kind.
        overrides: changes to the pair's recipe, KEY=VALUE.
    """

    rank: int = 8
    most: int = 5
    seconds: float | None = None
    tolerance: float = TOLERANCE
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise BadInputError(f"the seconds of a group's training are {self.seconds}; expected some.")


@dataclass(frozen=True)
class Route:
    """The drafter of an adapter, by the leader of its group; "_own" is the pair's.

    Attributes:
        before, now: τ of the adapter's target with the pair's own drafter, and with this one.
        kept: `now` ÷ τ of the pair on its own target, on the same prompts.
    """

    adapter: str
    drafter: str
    before: Figure
    now: Figure
    kept: Figure


@dataclass(frozen=True)
class GroupDrafter:
    """A drafter of the fleet.

    Attributes:
        drafter: where it is in the fleet's folder. bytes: of its change.
        gained: τ that it gives to the adapters which are routed to it, in all.
    """

    leader: str
    drafter: str
    bytes: int
    gained: float


@dataclass(frozen=True)
class FleetRoutes:
    """The routes of a fleet.

    Attributes:
        regained: share of the τ that was lost on adapters beyond the tolerance; None if nothing was.
    """

    routes: list[Route]
    groups: list[GroupDrafter]
    regained: float | None


class _Tried(ForeignModel, extra="forbid"):
    """The figures of an adapter's target with a drafter, both by their digests."""

    adapter: str
    drafter: str
    prompts: list[PromptMeasure]


def adapters_in(folder: Path) -> dict[str, Path]:
    """Return the PEFT adapters of a folder by name. BadInputError: there are none, or one takes the pair's name."""
    found = {file.parent.name: file.parent for file in sorted(folder.glob(f"*/{ADAPTER_CONFIG}"))}
    if not found or OWN in found:
        was = f"one called {OWN}" if found else "none"
        raise BadInputError(f"{folder}: found {was}; expected folders with {ADAPTER_CONFIG}, an adapter each.")
    return found


def read_routes(folder: Path) -> FleetRoutes:
    """Return the routes of the fleet in a folder. BadInputError: there are none, or they cannot be read."""
    file = folder / ROUTES
    advice = "Run `outrider lab fleet` to its end."
    try:
        found = TypeAdapter(FleetRoutes).validate_python(read_json(file))
    except (OSError, ValidationError) as error:
        said = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else reason(error)
        raise BadInputError(f"{file}: no routes of a fleet ({said}). {advice}") from error
    for group in found.groups:
        if not (folder / group.drafter).resolve().is_relative_to(folder.resolve()):
            raise BadInputError(f"{file}: the drafter {group.drafter!r} is not in this folder. {advice}")
    known = {OWN} | {group.leader for group in found.groups}
    if lost := {route.drafter for route in found.routes} - known:
        raise BadInputError(f"{file}: no routes of a fleet (there is no group of {min(lost)}). {advice}")
    return found


@dataclass
class Fleet:
    """The adapters of a pair's target, and what was tried on each of them."""

    pair: Pair
    adapters: Mapping[str, Path]
    folder: Path
    options: FleetOptions
    console: Console | None = None
    tried: dict[tuple[str, str], list[PromptMeasure]] = field(default_factory=dict)  # by adapter and leader
    leaders: dict[str, Path] = field(default_factory=dict)  # the drafters of groups
    loaded: dict[str, Target] = field(default_factory=dict)  # the last adapter's target

    def __post_init__(self) -> None:
        source, baseline = self.pair.manifest.target.source.path, self.pair.manifest.measurements.baseline
        if baseline is None:
            raise BadInputError(f"{self.pair.folder}: this pair has no calibration prompts; make it again with some.")
        if source is None or self.pair.adapter is not None:
            found = "was given in memory" if source is None else "is itself an adapter's"
            raise BadInputError(f"{self.pair.folder}: its target {found}; expected that of which all are adapters.")
        self.source: str = source
        self.baseline: ProbeBaseline = baseline

    def run(self) -> FleetRoutes:
        """Probe, learn and try until no adapter loses more than the tolerance or there are enough groups."""
        require_outside(self.folder, "the fleet")
        with locked(self.folder):
            self._begin()
            for name in self.adapters:
                self._try(name, OWN)
            while (leader := self._next_leader()) is not None:
                self._lead(leader)
                for name in sorted(self.hurt(), key=lambda name: name != leader):  # whose target is loaded comes first
                    self._try(name, leader)
            self.loaded.clear()
            routes = self.routes()
            text = TypeAdapter(FleetRoutes).dump_json(routes, indent=1).decode()
            write_atomically(self.folder / ROUTES, text + "\n")
            return routes

    def check_all(self) -> None:
        """Refuse what can be seen to end badly, before the first probe; no adapter's target is made for that.

        Raises as opening the pair, loading its adapters and refreshing it do.
        """
        target, _, _ = self.pair.open()
        for place in self.adapters.values():
            fitting_adapter(target.model, str(place))
        options = self.options
        recipe = refresh_recipe(self.pair, target, self.folder / "groups" / OWN, options.overrides)
        change = LowRank.over(self.pair.drafter_folder, target, options.rank)
        check_with_target(recipe, check(recipe, change, options.seconds), target, change)

    def kept(self, adapter: str, drafter: str) -> Interval:
        """Return τ of an adapter's target with a drafter ÷ τ of the pair on its own target."""
        return tau_change(self.tried[adapter, drafter], self.baseline.prompts, self.baseline)

    def hurt(self) -> list[str]:
        """Return the adapters that lose more than the tolerance with the pair's own drafter."""
        return [name for name in self.adapters if self.kept(name, OWN).value <= 1 - self.options.tolerance]

    def best(self, adapter: str) -> str:
        """Return the drafter with the largest τ of those that are certainly better than the pair's own; else that."""
        own = self.tried[adapter, OWN]
        better = [
            leader
            for leader in self.leaders
            if (adapter, leader) in self.tried and tau_change(self.tried[adapter, leader], own, self.baseline).low > 1
        ]
        return max(better, key=lambda leader: self.kept(adapter, leader).value, default=OWN)

    def routes(self) -> FleetRoutes:
        """Return every adapter's route by what has been tried."""
        routes = list[Route]()
        whole = tau_of(self.baseline.prompts, self.baseline).value
        hurt = self.hurt()
        lost = regained = 0.0
        gained = dict.fromkeys([OWN, *self.leaders], 0.0)
        for name in self.adapters:
            drafter = self.best(name)
            before, now = (tau_of(self.tried[name, d], self.baseline) for d in (OWN, drafter))
            kept = self.kept(name, drafter)
            routes.append(Route(name, drafter, Figure.of(before), Figure.of(now), Figure.of(kept)))
            gained[drafter] += now.value - before.value
            if name in hurt:
                lost += whole - before.value
                regained += min(now.value, whole) - before.value
        groups = list[GroupDrafter]()
        for leader, drafter_folder in self.leaders.items():
            size = (drafter_folder / ADAPTER_WEIGHTS).stat().st_size
            place = drafter_folder.relative_to(self.folder).as_posix()
            groups.append(GroupDrafter(leader, place, size, gained[leader]))
        return FleetRoutes(routes, groups, regained / lost if lost else None)

    def _next_leader(self) -> str | None:
        """Return the adapter that loses most with what was tried; None if there are enough groups, or none loses."""
        if len(self.leaders) == self.options.most:
            return None
        kept = {name: self.kept(name, self.best(name)).value for name in self.hurt() if name not in self.leaders}
        leader = min(kept, key=lambda name: kept[name], default=None)
        return leader if leader is not None and kept[leader] <= 1 - self.options.tolerance else None

    def _lead(self, leader: str) -> None:
        """Learn a change of the drafter from the answers of the leader's target."""
        options, target = self.options, self._target(leader)
        target.run_eagerly()  # as it was loaded: a probe may have packed its weights
        recipe = refresh_recipe(self.pair, target, self.folder / "groups" / leader, options.overrides)
        training = RefreshOptions(options.rank, options.seconds)
        self.leaders[leader] = refreshed_drafter(self.pair, recipe, target, training, self.console)

    def _target(self, adapter: str) -> Target:
        if adapter not in self.loaded:
            self.loaded.clear()  # before the next one takes memory
            revision = self.pair.manifest.target.source.revision
            place = str(self.adapters[adapter])
            self.loaded[adapter] = self.pair.load_target(self.source, revision=revision, adapter=place)
        return self.loaded[adapter]

    def _try(self, adapter: str, leader: str) -> None:
        """Count the rounds of an adapter's target with a drafter on the calibration prompts, unless that was done."""
        folder = self.pair.drafter_folder if leader == OWN else self.leaders[leader]
        file = self.folder / "tried" / adapter / f"{leader}.json"
        parts = [digest_file(self.adapters[adapter] / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
        now = (digest_json(parts), digest_json(digest_files(folder)))
        found = _Tried.model_validate(read_json(file)) if file.is_file() else None
        if found is None or (found.adapter, found.drafter) != now:
            target = self._target(adapter)
            drafter, prompts = load_drafter(folder, target), self.pair.calibration()
            counted = calibrate(target, drafter, prompts, self.baseline, self.pair.plan, self.console)
            found = _Tried(adapter=now[0], drafter=now[1], prompts=counted)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, found.model_dump_json(indent=1) + "\n")
        self.tried[adapter, leader] = found.prompts

    def _begin(self) -> None:
        """Check what is asked for, and write it down.

        Raises BadInputError if the folder holds something else, or a fleet that was asked for in another way.
        """
        file = self.folder / ASKED
        asked = json.dumps({"version": 2, "pair": self.pair.digest} | asdict(self.options), indent=1) + "\n"
        if not file.is_file():
            require_new(self.folder, "the fleet")
        elif read_text(file) != asked:
            raise BadInputError(f"{self.folder} holds a fleet that was asked for in another way; choose another --out.")
        self.check_all()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, asked)
