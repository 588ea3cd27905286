"""pair.json: what a pair is, where it comes from and what it achieved, in one schema-versioned file.

Two digests protect it. `digest` is the identity: the target's content, the drafter's files and the plan, and nothing
that depends on paths, dates or machines. `checksum` covers every other field, so that no edit of the file goes
unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal, NoReturn

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.safe_load import Unreadable, parse_json, read_bytes
from ..decode import Plan, Sampling
from ..eval.reports.figures import Interval
from ..eval.tuning import Tuning, merged
from ..targets import Fingerprint
from ..targets.fingerprint import digest_json

MANIFEST, RECIPE, CALIBRATION = "pair.json", "recipe.yaml", "calibration.jsonl"
SIGNATURE = "pair.json.sig"  # whose seal it is; see `signature`
DRAFTER, TOKENIZER, REPORTS, ADAPTER, SUITES = "drafter", "tokenizer", "reports", "adapter", "suites"
SCHEMA_VERSION: Final = 1


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    plain = path.as_posix() == name and not path.is_absolute() and ".." not in path.parts and path.parts
    if not plain or "\\" in name or ":" in path.parts[0] or not name.isprintable():
        raise ValueError(f"{name[:80]!r} is no plain path inside the pair")
    return name


# The path of a file inside a pair's folder: relative, without "..", as it is written on every system.
InsideName = Annotated[str, AfterValidator(_inside)]


class ManifestModel(BaseModel):
    """A part of pair.json; a key that the schema does not know is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class FingerprintRecord(ManifestModel):
    """An `outrider.targets.Fingerprint`, field by field."""

    tensors: dict[str, str]
    config: str
    tokenizer: str | None
    chat_template: str | None
    dtype: str
    digest: str

    def restored(self) -> Fingerprint:
        """Return the fingerprint; its digest is computed again from the other fields."""
        return Fingerprint.from_dict(self.model_dump())


class Source(ManifestModel):
    """Where the target was loaded from: for people, and for `Pair.open` without a target. No part of the identity."""

    path: str | None = None
    revision: str | None = None
    adapter: str | None = None
    quantize: str | None = None

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        return {k: v for k, v in values.items() if k != "quantize" or v is not None}


class TargetRecord(ManifestModel):
    """The target by content: the fingerprint is of the weights with the adapter merged, if there is one.

    Attributes:
        tokenizer_files: SHA-256 of each file in tokenizer/, kept to name tokens that differ later.
        adapter_files: the same of adapter/, kept to load the target again; not written where there is none.
    """

    fingerprint: FingerprintRecord
    source: Source
    tokenizer_files: dict[InsideName, str]
    adapter_files: dict[InsideName, str] = {}

    def kept_files(self) -> dict[str, str]:
        """Return the SHA-256 of the target's files that the pair keeps, by path inside the folder."""
        found = {f"{TOKENIZER}/{name}": digest for name, digest in self.tokenizer_files.items()}
        return found | {f"{ADAPTER}/{name}": digest for name, digest in self.adapter_files.items()}

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        return {k: v for k, v in values.items() if k != "adapter_files" or v}


class DrafterRecord(ManifestModel):
    """The drafter: its type, and the SHA-256 of each file in drafter/."""

    type: str
    files: dict[InsideName, str]


class PlanRecord(ManifestModel):
    """How the drafter is meant to be run: an `outrider.decode.Plan`, without what that does not use."""

    depth: int
    width: int = 1
    nodes: int | None = None
    tree: list[int] | None = None
    verify: str = "auto"
    confidence: float = 0.0
    control: dict[str, Any] | None = None

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        return {k: v for k, v in values.items() if k in ("depth", "verify") or v != type(self).model_fields[k].default}

    def restored(self) -> Plan:
        return Plan.from_dict(self.model_dump())


class Figure(ManifestModel):
    """A measured value with its confidence interval; None where nothing was measured."""

    value: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, interval: Interval | None) -> Figure:
        """Return the figure of an interval; that of None has no values."""
        if interval is None:
            return cls(value=None, low=None, high=None)
        return cls(**{name: _finite(getattr(interval, name)) for name in ("value", "low", "high")})


class Headline(ManifestModel):
    """The drafter's figures at one temperature, on all suites together.

    Attributes:
        rule: the verification rule.
        tau: mean tokens per round, with the bonus token.
        speedup: against the plain target in the same engine.
    """

    temperature: float
    rule: str
    num_prompts: int
    tau: Figure
    speedup: Figure


class PromptMeasure(ManifestModel):
    """What the drafter did on one calibration prompt.

    Attributes:
        accepted, rounds: of the decoder; tau = 1 + accepted / rounds.
        alpha, top1: sums over `positions` at depth 1 of Σ min(p, q) and of top-1 agreement. For drafters without a loss
            both are the accepted first drafts, and `positions` counts the rounds that drafted.
        analytic_tau: sum over `chains` starting positions of 1 + Σ_d Π alpha_i.
    """

    id: str
    suite: str
    accepted: int
    rounds: int
    alpha: float
    top1: float
    positions: int
    analytic_tau: float
    chains: int


class ProbeBaseline(ManifestModel):
    """The probe's figures for the pair's own target, prompt by prompt, and the settings that a probe must repeat."""

    max_new_tokens: int
    temperature: float
    seed: int
    prompts: list[PromptMeasure]

    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, seed=self.seed)


class Measurements(ManifestModel):
    """What was measured for this pair.

    Attributes:
        headline: per temperature, from the report that came with the pair.
        suites: digest of each suite's prompts, by name.
        conditions: under which the headline was measured (device, dtype, batch, …), for people.
        baseline: what a probe compares with; None if there were no prompts to calibrate on.
    """

    headline: list[Headline]
    suites: dict[str, str]
    conditions: dict[str, Any]
    baseline: ProbeBaseline | None


class ServedFigures(ManifestModel):
    """An engine's figures at one temperature, beside ours on the same prompts: `served` there, `own` here."""

    temperature: float
    num_prompts: int
    own: Figure
    served: Figure
    speedup: Figure


class ServedRecord(ManifestModel):
    """What one engine made of the pair (`outrider served`).

    Attributes:
        agrees: whether served equals measured. suspicions: if not, what is probably wrong.
    """

    created: str
    engine: str
    depth: int
    agrees: bool
    suspicions: list[str]
    figures: list[ServedFigures]


class Parent(ManifestModel):
    """The version that a pair was refreshed from."""

    name: str
    version: int
    digest: str


class Lineage(ManifestModel):
    """Where this version comes from, and why it was made."""

    parent: Parent | None
    reason: str


class Manifest(ManifestModel):
    """The whole of pair.json.

    `suites` are the prompt files that the pair is measured on and that no package ships. `tuning` says which plan is
    fastest where, `served` what engines made of it, the latest of each engine. Both depend on machines, so they are no
    part of the identity. What there is none of is not written: a pair that was never tuned, on packaged suites, reads
    as it always did.
    """

    schema_version: Literal[1]
    name: str
    version: int
    digest: str
    target: TargetRecord
    drafter: DrafterRecord
    recipe: str
    calibration: str | None
    reports: dict[InsideName, str]
    suites: dict[InsideName, str] = {}
    plan: PlanRecord
    measurements: Measurements
    lineage: Lineage
    created: str
    outrider_version: str
    tuning: list[Tuning] = []
    served: list[ServedRecord] = []
    checksum: str = ""

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        return {k: v for k, v in values.items() if k not in ("tuning", "served", "suites") or v}

    def identity(self) -> str:
        """Return the identity digest, computed from what it covers."""
        fingerprint, kept = self.target.fingerprint.restored(), self.target.kept_files()
        return identity_digest(fingerprint, self.drafter.files, self.plan, kept)

    def identified(self) -> Manifest:
        """Return this manifest with the identity digest of what it says."""
        return self.model_copy(update={"digest": self.identity()})

    def computed_checksum(self) -> str:
        return digest_json(self.model_dump(exclude={"checksum"}))

    def sealed(self) -> Manifest:
        """Return this manifest with its checksum."""
        return self.model_copy(update={"checksum": self.computed_checksum()})

    def tuned(self, tuning: Tuning) -> Manifest:
        """Return this manifest, sealed, with `tuning` in place of what was known of the same conditions."""
        return self.model_copy(update={"tuning": merged(self.tuning, tuning)}).sealed()

    def with_served(self, found: ServedRecord) -> Manifest:
        """Return this manifest, sealed, with `found` in place of what was known of the same engine and depth."""
        others = [r for r in self.served if (r.engine, r.depth) != (found.engine, found.depth)]
        return self.model_copy(update={"served": [*others, found]}).sealed()

    def files(self) -> dict[str, str]:
        """Return the SHA-256 of every file of the pair but pair.json, by path inside the folder."""
        found = {RECIPE: self.recipe} | {f"{REPORTS}/{name}": digest for name, digest in self.reports.items()}
        if self.calibration is not None:
            found[CALIBRATION] = self.calibration
        found |= {f"{DRAFTER}/{name}": digest for name, digest in self.drafter.files.items()}
        found |= {f"{SUITES}/{name}": digest for name, digest in self.suites.items()}
        return found | self.target.kept_files()

    def to_text(self) -> str:
        """Return the one way in which this manifest is written: any other bytes are an alteration."""
        return json.dumps(self.model_dump(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def write(self, folder: Path, instead_of: Manifest | None = None) -> None:
        """Write pair.json, all of it or nothing.

        Args:
            instead_of: what must stand there until now.

        Raises:
            BadInputError: somebody who holds no lock wrote another one meanwhile.
        """
        file = folder / MANIFEST
        if instead_of is not None and _read(file) != instead_of.to_text():
            raise BadInputError(f"{file} was written by somebody else at the same time; nothing was stored. Try again.")
        write_atomically(file, self.to_text())


def identity_digest(
    fingerprint: Fingerprint, drafter_files: dict[str, str], plan: PlanRecord, kept: dict[str, str]
) -> str:
    """Return a pair's identity by content: equal for the same target, drafter and plan, wherever and whenever made.

    Args:
        kept: the target's files that the pair keeps, and that are loaded with it.
    """
    parts = {"target": fingerprint.digest, "drafter": drafter_files, "plan": plan.model_dump(), "kept": kept}
    return digest_json(parts)


def read_manifest(folder: Path) -> Manifest:
    """Return pair.json of `folder`, checked against its schema and its checksum.

    Raises:
        BadInputError: no pair there, not valid JSON, another schema, an unknown key, or altered after it was written.
    """
    manifest, alterations = inspect_manifest(folder)
    if alterations:
        raise BadInputError(
            f"{folder / MANIFEST}: {'; '.join(alterations)}. Take a good copy of the pair, or look closer with "
            "`outrider pair verify`."
        )
    return manifest


def inspect_manifest(folder: Path) -> tuple[Manifest, list[str]]:
    """Return pair.json of `folder`, and what says that it was altered after it was written ([] if nothing does).

    Raises:
        BadInputError: it cannot be understood at all.
    """
    file = folder / MANIFEST
    return inspect_text(file, _read(file))


def inspect_text(file: Path, text: str) -> tuple[Manifest, list[str]]:
    """Return the manifest that `text` holds, and what says that it was altered after it was written.

    Args:
        file: where it came from, for the error.

    Raises:
        BadInputError: it cannot be understood at all.
    """
    manifest = _validated(file, _parsed(file, text))
    alterations = []
    if manifest.computed_checksum() != manifest.checksum:
        alterations.append("its content does not match its checksum")
    elif manifest.to_text() != text:
        alterations.append("its bytes differ from the form it was written in")
    if manifest.target.fingerprint.restored().digest != manifest.target.fingerprint.digest:
        alterations.append("the target's digest does not match the target's parts")
    if manifest.identity() != manifest.digest:
        alterations.append("the identity digest does not match target, drafter and plan")
    return manifest, alterations


def _read(file: Path) -> str:
    try:
        return read_bytes(file).decode("utf-8")
    except FileNotFoundError as error:
        raise BadInputError(f"no pair at {str(file.parent)!r}: {MANIFEST} is missing there.") from error
    except UnicodeDecodeError as error:
        _damaged(file, str(error))


def _parsed(file: Path, text: str) -> dict[str, Any]:
    try:
        values = parse_json(text, str(file))
    except Unreadable as error:
        _damaged(file, error.reason)
    if not isinstance(values, dict):
        _damaged(file, f"expected an object, found {type(values).__name__}")
    return values


def _validated(file: Path, values: dict[str, Any]) -> Manifest:
    version = values.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BadInputError(
            f"{file}: schema version {version} is newer than the {SCHEMA_VERSION} that this Outrider reads; upgrade "
            "Outrider."
        )
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        _damaged(file, "; ".join(_explained(error))[:400])


def _explained(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        yield f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def _damaged(file: Path, problem: str) -> NoReturn:
    raise BadInputError(f"{file}: damaged or not a pair ({problem}). Take a good copy of the pair.")


def _finite(value: float) -> float | None:
    return float(value) if value == value and abs(value) != float("inf") else None
