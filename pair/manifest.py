"""pair.json: a pair's identity, lineage and measurements in one schema-versioned file.

Two digests protect it. `digest` is the identity: of the target's content, the drafter's files and the plan, not of
paths, dates or machines. `checksum` covers every other field, so that no edit of the file goes unnoticed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal, NoReturn

from pydantic import AfterValidator, Field, ValidationError

from .. import decode
from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.digests import digest_json
from ..common.untrusted_files import RECORD, Unreadable, parse_json, read_bytes
from ..eval.reports.figures import Interval
from ..eval.tuning_record import Part, SparsePart, Tuning, merged
from ..targets.fingerprint import Fingerprint, precision_name

MANIFEST = "pair.json"
RECIPE = "recipe.yaml"
CALIBRATION = "calibration.jsonl"
LEARNT = "learnt.txt"
SIGNATURE = "pair.json.sig"
DRAFTER = "drafter"
TOKENIZER = "tokenizer"
REPORTS = "reports"
ADAPTER = "adapter"
SUITES = "suites"
# Raised when an earlier reader would not understand a pair. 1 was two schemas: before 2026-11-22 an identity did not
# cover tokenizer and adapter, as that of 2 did; from 2026-11-23 it was 3, with another config.json of the drafter.
SCHEMA_VERSION: Final = 3


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    plain = path.as_posix() == name and not path.is_absolute() and ".." not in path.parts and path.parts
    if not plain or "\\" in name or ":" in path.parts[0] or not name.isprintable():
        raise ValueError(f"{name[:80]!r} is no plain path inside the pair")
    return name


# The path of a file inside a pair's folder: relative, without "..", as it is written on every system.
InsideName = Annotated[str, AfterValidator(_inside)]


class FingerprintRecord(Part):
    """An `outrider.targets.Fingerprint`, field by field."""

    tensors: dict[str, str]
    config: str
    tokenizer: str | None
    chat_template: str | None
    dtype: str
    digest: str

    def restored(self) -> Fingerprint:
        """Return the fingerprint, with its digest computed from the other fields."""
        return Fingerprint.from_dict(self.model_dump())


class Source(SparsePart):
    """The place that the target was loaded from, for people and for `Pair.open`. No part of the identity."""

    OPTIONAL = ("quantize", "gguf", "gguf_type", "precision")

    path: str | None = None
    revision: str | None = None
    adapter: str | None = None
    quantize: str | None = None
    gguf: str | None = None
    gguf_type: str | None = None
    precision: str | None = None


class TargetRecord(SparsePart):
    """The target by content: the fingerprint is of the weights with the adapter merged, if there is one.

    Attributes:
        tokenizer_files: SHA-256 of each file in tokenizer/, kept to name tokens that differ later.
        adapter_files: SHA-256 of each file in adapter/, kept to load the target again.
    """

    OPTIONAL = ("adapter_files",)

    fingerprint: FingerprintRecord
    source: Source
    tokenizer_files: dict[InsideName, str]
    adapter_files: dict[InsideName, str] = Field(default={})

    @property
    def precision(self) -> str:
        """The precision of the target's weights, for people."""
        return precision_name(self.source.model_dump(), self.fingerprint.dtype)

    def kept_files(self) -> dict[str, str]:
        """Return the SHA-256 of the target's files that the pair keeps, by path inside the folder."""
        return _placed(TOKENIZER, self.tokenizer_files) | _placed(ADAPTER, self.adapter_files)


def _placed(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": digest for name, digest in files.items()}


class DrafterRecord(Part):
    """The drafter: its type, and the SHA-256 of each file in drafter/."""

    type: str
    files: dict[InsideName, str]


class PlanRecord(SparsePart):
    """The drafter's `outrider.decode.Plan`."""

    OPTIONAL = ("width", "nodes", "tree", "confidence", "control")

    depth: int
    width: int = 1
    nodes: int | None = None
    tree: list[int] | None = None
    verify: str = "auto"
    confidence: float = 0.0
    control: dict[str, Any] | None = None

    def restored(self) -> decode.Plan:
        return decode.Plan.from_dict(self.model_dump())


class Figure(Part):
    """A measured value with its confidence interval; None for numbers that were not measured."""

    value: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, interval: Interval | None) -> Figure:
        """Return the figure of an interval; that of None has no values."""
        numbers = {name: getattr(interval, name, None) for name in ("value", "low", "high")}
        return cls(**{k: float(v) if v is not None and math.isfinite(v) else None for k, v in numbers.items()})

    def interval(self) -> Interval:
        """Return the interval; nan for numbers that were not measured."""
        return Interval(*(math.nan if v is None else v for v in (self.value, self.low, self.high)))

    def text(self, missing: str, decimals: int = 2) -> str:
        """Return `2.41 [2.33, 2.49]`, the value alone without an interval, `missing` without a value."""
        return missing if self.value is None else self.interval().text(decimals)


class Headline(Part):
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


class PromptMeasure(Part):
    """The drafter's figures on one calibration prompt.

    Attributes:
        accepted, rounds: of the decoder, of emitted tokens; tau = 1 + accepted / rounds.
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


class ProbeBaseline(Part):
    """The probe's figures for the pair's own target, prompt by prompt, and the settings that a probe must repeat."""

    max_new_tokens: int
    temperature: float
    seed: int
    prompts: list[PromptMeasure]

    def sampling(self) -> decode.Sampling:
        return decode.Sampling(temperature=self.temperature, seed=self.seed)


class Measurements(Part):
    """The measurements of this pair.

    Attributes:
        headline: per temperature, from the report that came with the pair.
        suites: digest of each suite's prompts, by name.
        conditions: of the headline (device, dtype, batch, …), for people.
        baseline: a probe's figures to compare with; None without calibration prompts.
    """

    headline: list[Headline]
    suites: dict[str, str]
    conditions: dict[str, Any]
    baseline: ProbeBaseline | None


class ServedFigures(Part):
    """An engine's figures at one temperature (`served`), beside our own on the same prompts."""

    temperature: float
    num_prompts: int
    own: Figure
    served: Figure
    speedup: Figure


class ServedRecord(Part):
    """An engine's figures with the pair (`outrider served`).

    Attributes:
        agrees: whether served equals measured. suspicions: if not, the probable causes.
    """

    created: str
    engine: str
    depth: int
    agrees: bool
    suspicions: list[str]
    figures: list[ServedFigures]


class Parent(Part):
    """The version that a pair was refreshed from."""

    name: str
    version: int
    digest: str


class Lineage(Part):
    """The parent of this version, and the reason for making it."""

    parent: Parent | None
    reason: str


class Manifest(SparsePart):
    """The whole of pair.json.

    Attributes:
        learnt: SHA-256 of the file with the digests of the questions that the drafter learned from; None if the
            responses were not there when the pair was made.
        suites: prompt files that the pair is measured on and that no package ships.
        sizes: bytes of each of `files`, by which files are judged before they are read, or copied from a registry.
        tuning: the fastest plans by machine. served: the latest record of each engine. No part of the identity, since
            they depend on machines.
    """

    OPTIONAL = ("tuning", "served", "suites", "sizes", "learnt")

    schema_version: Literal[1, 2, 3]
    name: str
    version: int
    digest: str
    target: TargetRecord
    drafter: DrafterRecord
    recipe: str
    calibration: str | None
    learnt: str | None = None
    reports: dict[InsideName, str]
    suites: dict[InsideName, str] = Field(default={})
    plan: PlanRecord
    measurements: Measurements
    lineage: Lineage
    created: str
    outrider_version: str
    sizes: dict[InsideName, Annotated[int, Field(ge=0)]] = Field(default={})
    tuning: list[Tuning] = Field(default=[])
    served: list[ServedRecord] = Field(default=[])
    checksum: str = ""

    def identity(self) -> str:
        """Return the identity by content: equal for the same target, drafter and plan, wherever and whenever made."""
        return digest_json(self._identified_by() | {"kept": self.target.kept_files()})

    def _identified_by(self) -> dict[str, Any]:
        target = self.target.fingerprint.restored().digest
        return {"target": target, "drafter": self.drafter.files, "plan": self.plan.model_dump()}

    def is_of_first_schema(self) -> bool:
        """Return whether the identity is one of before 2026-11-22, which did not cover the target's files."""
        return self.schema_version == 1 and self.digest == digest_json(self._identified_by())

    def identified(self) -> Manifest:
        """Return this manifest with its identity digest."""
        return self.model_copy(update={"digest": self.identity()})

    def computed_checksum(self) -> str:
        return digest_json(self.model_dump(exclude={"checksum"}))

    def sealed(self) -> Manifest:
        """Return this manifest with its checksum."""
        return self.model_copy(update={"checksum": self.computed_checksum()})

    def tuned(self, tuning: Tuning) -> Manifest:
        """Return this manifest, sealed, with `tuning` in place of an earlier one under the same conditions."""
        return self.model_copy(update={"tuning": merged(self.tuning, tuning)}).sealed()

    def with_served(self, record: ServedRecord) -> Manifest:
        """Return this manifest, sealed, with `record` in place of an earlier one of the same engine and depth."""
        others = [r for r in self.served if (r.engine, r.depth) != (record.engine, record.depth)]
        return self.model_copy(update={"served": [*others, record]}).sealed()

    def measured(self) -> set[str]:
        """Return the names of the measurements that this manifest holds, for people."""
        found = {f"the figures at temperature {one.temperature:g}" for one in self.measurements.headline}
        found |= {f"the figures of {one.engine} at depth {one.depth}" for one in self.served}
        if self.measurements.baseline is not None:
            found.add("the baseline of probes")
        return found | {
            f"the tuning for batch {batch.batch_size} at temperature {one.temperature:g} ({', '.join(one.machine)})"
            for one in self.tuning
            for batch in one.batches
        }

    def files(self) -> dict[str, str]:
        """Return the SHA-256 of every file of the pair but pair.json, by path inside the folder."""
        files = {RECIPE: self.recipe} | _placed(REPORTS, self.reports)
        if self.calibration is not None:
            files[CALIBRATION] = self.calibration
        if self.learnt is not None:
            files[LEARNT] = self.learnt
        return files | _placed(DRAFTER, self.drafter.files) | _placed(SUITES, self.suites) | self.target.kept_files()

    def sizes_in(self, folder: str) -> dict[str, int]:
        """Return the sizes in bytes of the files in one of the pair's folders, as far as they are known, by name."""
        return {n.removeprefix(f"{folder}/"): size for n, size in self.sizes.items() if n.startswith(f"{folder}/")}

    def to_text(self) -> str:
        """Return the text of pair.json: any other bytes are an alteration."""
        return json.dumps(self.model_dump(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def write(self, folder: Path, instead_of: Manifest | None = None) -> None:
        """Write pair.json, all of it or nothing.

        Args:
            instead_of: the manifest that must still stand there.

        Raises:
            BadInputError: another one was written meanwhile, without a lock.
        """
        file = folder / MANIFEST
        if instead_of is not None and _read(file) != instead_of.to_text():
            raise BadInputError(f"{file} was written by somebody else at the same time; nothing was stored. Try again.")
        write_atomically(file, self.to_text())


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
    """Return pair.json of `folder`, and the signs that it was altered after it was written.

    Raises:
        BadInputError: it cannot be understood at all.
    """
    return inspect_text(folder / MANIFEST, _read(folder / MANIFEST))


def inspect_text(file: Path, text: str) -> tuple[Manifest, list[str]]:
    """Return the manifest in `text`, and the signs that it was altered after it was written; `file` is for errors.

    Raises:
        BadInputError: it cannot be understood at all.
    """
    manifest = _validated(file, text)
    if manifest.is_of_first_schema():
        raise BadInputError(
            f"{file}: written by Outrider {manifest.outrider_version} on {manifest.created[:10]}, under the schema of "
            "before 2026-11-22, in which a pair's identity did not cover tokenizer and adapter. Make the pair again "
            "(`outrider pair new`), or read it with an Outrider of that day."
        )
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


def _validated(file: Path, text: str) -> Manifest:
    try:
        values = parse_json(text, str(file), RECORD)
    except Unreadable as error:
        _damaged(file, error.reason)
    if not isinstance(values, dict):
        _damaged(file, f"expected an object, found {type(values).__name__}")
    version = values.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BadInputError(
            f"{file}: schema version {version} is newer than the {SCHEMA_VERSION} that this Outrider reads; upgrade "
            "Outrider."
        )
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        _damaged(file, "; ".join(problems)[:400])


def _damaged(file: Path, problem: str) -> NoReturn:
    raise BadInputError(f"{file}: damaged or not a pair ({problem}). Take a good copy of the pair.")
