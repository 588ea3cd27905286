"""A drafter on disk: config.json holds its type and settings, model.safetensors its weights."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, cast, get_type_hints

from safetensors.torch import save_file
from torch import nn

from ..common import BadInputError, refuse_unknown_keys
from ..common.atomic import replacing, write_atomically
from ..common.runtime import installed_version
from ..common.untrusted_files import read_json
from ..common.values import checked_value
from ..targets import Target
from ..targets.fingerprint import digest_json
from ..targets.model_folder import check_config, check_regular
from ..targets.weights import WEIGHTS, digest_tensor, restored

CONFIG = "config.json"
SCHEMA_VERSION = 1  # of our config.json: raised when an earlier Outrider would read a new one wrongly
_STAMP = ("schema_version", "outrider_version")
# Settings that earlier versions wrote into configs and recipes, with the value that meant "off", and the last day that
# had them. What was off is read without them, what was on is refused: no code is left that computes it.
GONE: Mapping[str, tuple[Any, str]] = {
    "prune": (False, "2026-11-20"),  # draft_model: now `init: prune`
    "feature_fade": (0.0, "2026-11-23"),  # eagle1, eagle3, peagle
    "norm_inputs": (False, "2026-11-27"),  # eagle1
    "grow_steps": (0.0, "2026-11-28"),  # eagle1, eagle3, peagle
    "weighting": ("decay", "2026-11-28"),  # eagle1, eagle3, peagle
}
_MAX_SIZE = 2**31 - 1  # of any length or count
_MAX_MODULES = 1024  # of these, each of which is built by itself: a million of them would take an hour, and no memory
_MODULES = ("num_layers", "num_heads", "num_blocks", "depth")

_log = logging.getLogger(__name__)


@dataclass
class DrafterConfig:
    """The settings of a drafter, saved as config.json beside its weights.

    `least`: the smallest values of settings.
    `shares`: settings that are at most 1.
    `words`: the values of settings that are one of a few words. A recipe's `init` that is none of its words is the
        folder of a saved drafter.
    """

    least: ClassVar[Mapping[str, int]] = {}
    shares: ClassVar[tuple[str, ...]] = ()
    words: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for name, least in self.least.items():
            if (value := getattr(self, name)) < least:
                raise BadInputError(f"drafter: {name} must be at least {least}, got {value}.")
        for name in self.shares:
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise BadInputError(f"drafter: {name} is a share between 0 and 1, got {value}.")
        if (decay := getattr(self, "decay", 1)) <= 0:
            raise BadInputError(f"drafter: decay must be above 0, got {decay}: later drafts would weigh nothing.")
        for name, words in self.words.items():
            if (value := getattr(self, name)) not in words:
                raise BadInputError(f"drafter: {name} must be one of {', '.join(words)}, found {value!r}.")

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "drafter") -> Self:
        """Build a config from a mapping of plain values. All numbers are sizes, counts or weights.

        Raises BadInputError for an unknown key, a value of another type than its field's, or a negative number.
        """
        known = [f.name for f in fields(cls)]
        values = _without_gone(values, known, where)
        refuse_unknown_keys(values, known, where)
        hints = get_type_hints(cls)
        checked = {name: checked_value(f"{where}.{name}", value, hints[name]) for name, value in values.items()}
        for name, value in checked.items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise BadInputError(f"{where}.{name}: expected 0 or more, found {value}.")
            most = _MAX_MODULES if name in _MODULES else _MAX_SIZE
            if isinstance(value, int) and value > most:
                raise BadInputError(f"{where}.{name}: expected at most {most}, found {value}.")
        return cls(**checked)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)

    def to_json_string(self) -> str:
        """Return the settings for the tensorboard report of `transformers`."""
        return json.dumps(self.to_dict(), indent=2)


def _without_gone(values: dict[str, Any], known: Collection[str], where: str) -> dict[str, Any]:
    """Return settings without those that went, and were off; BadInputError for one that was on."""
    gone = sorted(values.keys() & GONE.keys() - set(known))
    for name in gone:
        off, last_day = GONE[name]
        if values[name] != off:
            raise BadInputError(
                f"{where}.{name}: {values[name]!r} is a setting that Outrider had until {last_day}, and this version "
                f"reads it only as {off!r}, which was off. Train without it, or use an Outrider of that day."
            )
    if gone:
        _log.info("%s: read without %s: settings of earlier versions, which were off.", where, ", ".join(gone))
    return {name: value for name, value in values.items() if name not in gone}


C = TypeVar("C", bound=DrafterConfig)


class SavedDrafter(nn.Module, Generic[C]):
    """A drafter's settings and weights: saved, restored, and identified by their content."""

    name: ClassVar[str]
    config_class: ClassVar[type[DrafterConfig]] = DrafterConfig
    config: C

    def __init__(self, config: C | None = None):
        super().__init__()
        self.config = config or cast(C, self.config_class())

    @classmethod
    def configured(cls, values: dict[str, Any], where: str) -> C:
        """Return a config of this drafter's kind from plain values, see `DrafterConfig.from_dict`."""
        return cast(C, cls.config_class.from_dict(values, where))

    @classmethod
    def from_folder(cls, folder: Path, values: dict[str, Any], target: Target | None) -> Self:
        """Restore the drafter that `save` wrote; `values` is config.json without `drafter_type`."""
        config = cls.configured(values, f"{folder / CONFIG}: drafter")
        return restored(lambda: cls(config), folder)

    def save(self, path: str | Path) -> None:
        """Write config.json and model.safetensors into the folder `path`."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        with replacing(folder / WEIGHTS) as temporary:
            save_file(weights, temporary, metadata={"format": "pt"})
        self.save_config(folder)

    def save_config(self, folder: Path) -> None:
        stamp = dict(zip(_STAMP, (SCHEMA_VERSION, installed_version("outrider")), strict=True))
        values = {"drafter_type": self.name, **stamp, **self.config.to_dict()}
        write_atomically(folder / CONFIG, json.dumps(values, indent=2) + "\n")

    def identity_settings(self) -> dict[str, Any]:
        """Return the settings that are part of `digest`."""
        return self.config.to_dict()

    def digest(self) -> str:
        """Return SHA-256 of its type, settings and weights; saving and loading in the same dtype keeps it."""
        weights = {name: digest_tensor(tensor) for name, tensor in sorted(self.state_dict().items())}
        return digest_json({"type": self.name, "settings": self.identity_settings(), "weights": weights})


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the config.json of a saved drafter, without the versions that wrote it.

    Raises BadInputError if there is none, or a later version wrote it under another schema.
    """
    file = Path(path) / CONFIG
    if not file.exists():
        within = file.parent / "drafter"  # of a pair, or of a run
        hint = f" One lies in it: {within}." if (within / CONFIG).is_file() else ""
        raise BadInputError(f"no drafter at {str(path)!r}: {CONFIG} is missing there.{hint}")
    check_regular(Path(path))
    values = read_json(file)
    check_config(values, str(file))
    if not is_stamped(values):
        return values
    schema, version = (values.pop(name, None) for name in _STAMP)
    if schema != SCHEMA_VERSION:
        raise BadInputError(
            f"{file}: schema version {schema!r}, written by Outrider {version}; this one reads {SCHEMA_VERSION}. "
            "Upgrade Outrider."
        )
    return values


def is_stamped(values: dict[str, Any]) -> bool:
    """Return whether the values of a config.json name the versions that wrote it, as ours do from 2026-11-28 on."""
    return "drafter_type" in values and _STAMP[0] in values
