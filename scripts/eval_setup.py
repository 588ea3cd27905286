"""The setup of `outrider eval`, `tune` and `pair new`: a drafter on its target, and how to measure it.

It comes from a recipe's run or from a pair. The target is loaded in the dtype that is measured (`eval.dtype`, else
`target.dtype`): a pair names exactly what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..common import BadInputError
from ..decode import Plan
from ..distill.data_set import learnt_questions
from ..distill.responses import data_folder, target_in_engine
from ..eval import Report
from ..eval.generation_config import sampled_settings
from ..eval.measure import Contestant, contestants, measure, plan_of
from ..eval.reports.statistics import detectable, prompts_needed
from ..eval.suites import Suite, suites_of
from ..eval.tuning_record import BatchTuning
from ..heads import Drafter, head_class, load_drafter
from ..pair import Pair
from ..pair.manifest import read_manifest
from ..pair.pair import tuned_drafter
from ..recipes import EngineSpec, EvalSpec, Recipe, load_recipe
from ..serving.engine_report import measure_in_engine
from ..targets import Target, config_only_target
from ..targets.fingerprint import digest_json
from ..targets.loading import split_shape
from ..train.provenance import require_result, target_of

_TRIED = 8  # prompts of each suite, that tell how many `EvalSetup.sized` takes
_SHAPE = {"depth", "width", "nodes"}


@dataclass
class EvalSetup:
    """A drafter on its target, under a plan, and how to measure it.

    Attributes:
        report_folder: the usual place of a report. Never inside a pair, whose files are sealed.
        suites: read before the target's weights were loaded, so that a bad one costs nothing.
        tuned: the tuner's result, to be measured beside the first: another plan, perhaps of a fusion.
        engine: of a target without its layers.
        with_generate: whether `transformers.generate` is measured, too.
    """

    target: Target
    drafter: Drafter
    plan: Plan
    settings: EvalSpec
    report_folder: Path
    suites: list[Suite]
    tuned: BatchTuning | None = None
    with_generate: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)
    engine: EngineSpec | None = None

    def require_own_report(self, folder: Path) -> None:
        """Raise BadInputError if a report in `folder` is about another drafter than this one."""
        try:
            known = Report.load(folder)
        except BadInputError:  # no report, or a damaged one
            return
        if self.drafter.digest() not in {one.digest for one in known.contestants}:
            raise BadInputError(
                f"{folder} holds a report about another drafter; say --replace, or give another place (--out)."
            )

    def measure(self, console: Console | None = None) -> Report:
        """Measure the drafter beside its baselines and the plain target; where that lives in an engine, there."""
        if self.engine is not None:
            if self.tuned is not None:
                raise BadInputError("--tuned: an engine drafts chains of the pair's depth; leave it out.")
            depth = self.plan.depth
            return measure_in_engine(self.target, self.drafter, self.suites, self.settings, self.engine, console, depth)
        first, *others = contestants(self.target, self.drafter, self.settings, self.plan)
        tuned = [] if self.tuned is None else [tuned_contestant(self.tuned, self.drafter)]
        entrants = [first, *tuned, *others]
        report = measure(self.target, entrants, self.suites, self.settings, self.with_generate, console)
        report.conditions.template = dict(self.template)
        return report

    def sized(self, difference: float, console: Console | None = None) -> tuple[EvalSetup, str]:
        """Return this setup with the prompts that four of five runs need to find a relative difference, and why.

        A first look at a few prompts of each suite shows how far τ and the speedup differ between prompts.
        """
        quick = {"limit": _TRIED, "temperatures": self.settings.temperatures[:1], "repeats": 1, "baselines": []}
        look = replace(self, settings=self.settings.model_copy(update=quick), tuned=None, with_generate=False)
        figures = look.measure(console).headline()
        seen = figures.num_prompts
        sizes = [len(suite.prompts) for suite in self.suites]
        known = []
        for interval in filter(None, (figures.tau, figures.speedup)):
            needed = prompts_needed(interval, seen, difference)
            if needed is None:
                words = f"a first look at {seen} prompts tells nothing of the noise; measuring all {sum(sizes)}"
                return self.limited_to(None), words
            known.append((needed, interval))
        needed, noisiest = max(known, key=lambda pair: pair[0])
        limit, taken = _limit_for(needed, sizes)
        words = (
            f"a difference of {difference:.1%} from a fixed number needs about {needed} prompts, by a look at {seen}"
        )
        if taken < needed:
            least = detectable(noisiest, seen, taken)
            words += f"; there are too few: with all {taken}, one of {least:.1%} is found in 4 runs of 5"
        else:
            words += f"; measuring {taken}, {limit} of each suite"
        return self.limited_to(limit), words

    def limited_to(self, limit: int | None) -> EvalSetup:
        """Return this setup with so many prompts of each suite; None for all."""
        return replace(self, settings=self.settings.model_copy(update={"limit": limit}))


def _limit_for(needed: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the prompts of each suite that give `needed` in all, or everything there is, and how many these are."""
    for limit in range(2, max(sizes) + 1):
        taken = sum(min(limit, size) for size in sizes)
        if taken >= needed:
            return limit, taken
    return max(sizes), sum(sizes)


@dataclass(frozen=True)
class EvalOptions:
    """The options of a command that measures a recipe or a pair.

    Attributes:
        changes: `key=value` overrides. A pair can follow those of `eval`, and `data.allow_leaks`.
        settings: fields of EvalSpec that replace the recipe's.
        drafter: a saved drafter to take instead.
        target, adapter, quantize: a changed target to measure a pair on.
        tuned: whether a pair's tuned plan is measured too.
        quick: one temperature (the first), one repeat, and no `transformers.generate` beside.
    """

    changes: Sequence[str] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    drafter: Path | None = None
    target: str | None = None
    adapter: str | None = None
    quantize: str | None = None
    tuned: bool = False
    quick: bool = False

    def other_shape(self) -> bool:
        """Return whether another shape of drafts than the recipe's is asked for."""
        keys = {f"eval.{name}" for name in (*_SHAPE, "tree")}
        return not (_SHAPE.isdisjoint(self.settings) and keys.isdisjoint(map(_key, self.changes)))

    def settings_of(self, recipe: Recipe) -> EvalSpec:
        """Return the recipe's settings with what is asked for."""
        shape = {"tree": None} if _SHAPE & set(self.settings) else {}
        values = recipe.model_dump()
        asked = Recipe.from_dict(values | {"eval": values["eval"] | self.settings | shape}, "the options").eval
        plan_of(asked)  # refused before anything is loaded
        if asked.sampling == "served" and (
            "temperatures" in self.settings or "eval.temperatures" in map(_key, self.changes)
        ):
            raise BadInputError("eval.sampling: served measures at the target's own temperature; leave out another.")
        if not self.quick:
            return asked
        first = {} if "temperatures" in self.settings else {"temperatures": asked.temperatures[:1]}
        return asked.model_copy(update=first | {"repeats": 1})


def load_setup(name: str, asked: EvalOptions | None = None) -> EvalSetup:
    """Load a recipe's run or a pair, by whether `name` is a folder that holds a pair.json.

    Raises:
        BadInputError: there is no such recipe or pair, no tuned plan, or something is asked for that it cannot follow.
    """
    asked = asked or EvalOptions()
    folder = Path(name).expanduser()
    return _of_pair(folder, asked) if (folder / "pair.json").is_file() else _of_recipe(name, asked)


def _of_recipe(name: str, asked: EvalOptions) -> EvalSetup:
    if asked.tuned:
        raise BadInputError(
            f"--tuned: {name!r} is a recipe; tuned plans are kept in pairs. "
            "Make one with `outrider pair new`, then run `outrider tune`."
        )
    if asked.target or asked.adapter or asked.quantize:
        raise BadInputError(
            f"--target and --adapter measure a pair on a changed target; {name!r} is a recipe. Say target.path=… and "
            "target.adapter=… instead."
        )
    recipe = load_recipe(name, asked.changes)
    settings, place = asked.settings_of(recipe), recipe.target
    outline = target_outline(place.path, place.revision, place.trust_remote_code)
    used = sampled_settings(outline, settings)
    kind = recipe.drafter.get("type")
    learns = asked.drafter is None and (kind is None or head_class(kind).trainable)
    responses = data_folder(recipe)
    learnt = learnt_questions(responses) if learns else set()
    suites = suites_of(outline, used, recipe.template, learnt, f"the responses in {responses}", recipe.data.allow_leaks)
    saved = asked.drafter or trained_drafter(recipe)
    target = load_target(recipe)
    require_own_target(recipe, saved, target)
    drafter = load_drafter(saved, target)
    folder = recipe.output_folder / "reports" / "quick"  # never where `pair new` looks
    if not asked.quick:
        folder = report_folder(name, asked.changes, settings, None if asked.drafter is None else drafter)
    return EvalSetup(
        target,
        drafter,
        plan_of(used),
        used,
        folder,
        suites,
        with_generate=not asked.quick,
        template=recipe.template,
        engine=recipe.target.engine,
    )


def report_folder(
    name: str, changes: Sequence[str] = (), settings: EvalSpec | None = None, drafter: Drafter | None = None
) -> Path:
    """Return the folder for a measurement of a recipe's run: `report`, if it is the one that the recipe describes.

    Any other measurement, by other `settings` or of another drafter, has a folder of its own under `reports`.
    `outrider pair new` looks in the same place, so that a quick look never takes the place of the real figures.
    """
    recipe = load_recipe(name, changes)
    settings = settings or recipe.eval
    described = load_recipe(name, [c for c in changes if _key(c).partition(".")[0] != "eval"]).eval
    if settings == described and drafter is None:
        return recipe.output_folder / "report"
    measured = [settings.model_dump(), None if drafter is None else drafter.digest()]
    return recipe.output_folder / "reports" / digest_json(measured)[:12]


def _of_pair(folder: Path, asked: EvalOptions) -> EvalSetup:
    _refuse_unfollowed(asked)
    pair = Pair.load(folder)
    # The pair's target has the pair's dtype, whatever the recipe once asked for.
    recipe, source = pair.recipe(asked.changes), pair.manifest.target.source
    settings = asked.settings_of(recipe).model_copy(update={"dtype": "auto"})
    place = (asked.target, None) if asked.target is not None else (source.path, source.revision)
    outline = target_outline(*place)
    settings = sampled_settings(outline, settings)
    learnt, data = pair.learnt() if asked.drafter is None else set(), f"the training data of the pair {pair.name!r}"
    suites = suites_of(outline, settings, recipe.template, learnt, data, recipe.data.allow_leaks)
    changed = asked.target is not None
    if changed:
        target = pair.load_target(asked.target, adapter=asked.adapter, quantize=asked.quantize)
    else:
        target = pair.load_target(layers=False)
    engine = None if target.has_layers else _engine_asked(recipe, asked, folder)
    target, own, plan = pair.open(target, check=not changed)
    plan = replace(plan_of(settings), verify=plan.verify) if asked.other_shape() else plan
    found = pair.tuned(target, temperature=settings.temperatures[0]) if asked.tuned else None
    if asked.tuned and found is None:
        raise BadInputError(
            f"--tuned: this pair was not tuned for this machine and dtype; run `outrider tune {folder}` first."
        )
    report = f"{pair.name}-v{pair.version}" + (f"-on-{target.fingerprint().digest[:12]}" if changed else "")
    report += "-quick" if asked.quick else ""
    if asked.drafter and not changed:
        require_own_target(recipe, asked.drafter, target)
    drafter = load_drafter(asked.drafter, target) if asked.drafter else own
    return EvalSetup(
        target,
        drafter,
        plan,
        settings,
        Path("runs") / "reports" / report,
        suites,
        tuned=found,
        with_generate=not asked.quick,
        template=recipe.template,
        engine=engine,
    )


def target_outline(path: str | None, revision: str | None = None, trust_remote_code: bool = False) -> Target:
    """Return the target at `path` as far as suites and sampling need it, before its weights are loaded.

    Raises:
        BadInputError: there is no path, or nothing readable there.
    """
    if path is None:
        raise BadInputError("the pair's target was given in memory, so it cannot be loaded again; name one (--target).")
    return config_only_target(split_shape(path)[0], revision, trust_remote_code=trust_remote_code)


_ENGINE = ("target.engine.python", "target.engine.arguments")


def _engine_asked(recipe: Recipe, asked: EvalOptions, folder: Path) -> EngineSpec:
    """Return the engine that the caller names: no pair's recipe decides which programs run."""
    named, own = {_key(change) for change in asked.changes}, recipe.target.engine
    if own is None or _ENGINE[0] not in named:
        raise BadInputError(
            f"the target of {folder} lives in an engine: name the environment that starts it (target.engine.python=…), "
            "or load the whole target (--target). What the pair's own recipe names is not run."
        )
    return own if _ENGINE[1] in named else own.model_copy(update={"arguments": []})


def _refuse_unfollowed(asked: EvalOptions) -> None:
    """Refuse what a pair cannot follow: only how it is measured can be changed."""
    for change in asked.changes:
        key = _key(change)
        if (not key.startswith("eval.") or key == "eval.dtype") and key not in ("data.allow_leaks", *_ENGINE):
            raise BadInputError(
                f"a pair cannot follow the override {change!r}: its target, drafter and data are what they are, only "
                "settings of eval can be changed. --target (with --adapter) measures it on a changed target, --drafter "
                "another drafter."
            )
    if (asked.adapter or asked.quantize) and asked.target is None:
        raise BadInputError("--adapter and --quantize change a target; name that with --target.")


def _key(change: str) -> str:
    return change.partition("=")[0].strip()


def tuned_contestant(found: BatchTuning, drafter: Drafter) -> Contestant:
    """Return the tuned plan of `drafter`, or of its fusion with the drafter without weights that the tuner chose."""
    kind = "" if found.statistical is None else f" + {found.statistical['type']}"
    return Contestant(f"{drafter.name}{kind} tuned", tuned_drafter(found, drafter), found.plan, tuned=True)


def load_target(recipe: Recipe) -> Target:
    """Return the recipe's target in the dtype that is measured."""
    if recipe.target.engine is not None:
        return target_in_engine(recipe.target)
    spec = recipe.target.to_load()
    return Target.load(**spec | ({} if recipe.eval.dtype == "auto" else {"dtype": recipe.eval.dtype}))


def require_own_target(recipe: Recipe, drafter: Path, target: Target) -> None:
    """Refuse a target that a saved drafter was not made for, by the run or the pair around it, if any is known.

    The recipe's target may be loaded in another dtype: then its files count.
    """
    around = drafter.expanduser().resolve().parent
    around = around.parent if around.name == "checkpoints" else around
    is_in_pair = (around / "pair.json").is_file()
    known = read_manifest(around).target.fingerprint.restored() if is_in_pair else target_of(around)
    if known is None:
        return
    found, spec = target.fingerprint(), recipe.target
    if known.differences(found) and spec.engine is None and found.dtype != known.dtype:
        as_trained = spec.to_load() | {"dtype": known.dtype}
        del as_trained["sharding"]
        found = config_only_target(**as_trained).fingerprint()
    target.check_same(known, f"the drafter in {drafter}", spec.allow_changed, found)


def trained_drafter(recipe: Recipe) -> Path:
    """Return the folder of the drafter that the recipe's training left; BadInputError for none."""
    if not (recipe.output_folder / "drafter").is_dir():
        raise BadInputError(
            f"there is no trained drafter in {recipe.output_folder}: "
            "run `outrider train` with this recipe first, or name the folder of a saved one with --drafter."
        )
    return require_result(recipe.output_folder, "drafter")
