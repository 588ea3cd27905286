"""A pair's drafter in a vLLM whose target has changed: is τ there what our decoder counts on that target?

The changed target is written as a plain checkpoint that any engine reads: an adapter merged, weights of eight bits
multiplied out, which is the same function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from outrider.eval.suites import Suite
from outrider.formats import export_drafter, launch
from outrider.formats.early_exit import save_target
from outrider.pair import Pair
from outrider.common.server_process import python_of
from outrider.serving.launching import VllmLaunch, running
from outrider.serving.reference_run import Trial, expect
from outrider.serving.result import TOLERANCE, ServedResult
from outrider.serving.served import Survey, engine_facts
from outrider.targets import Target

from .acceptance import shown

# What no plain checkpoint can say: the other side of a product is rounded there, too.
ONLY_HERE = ("int8-dynamic",)


@dataclass(frozen=True)
class Elsewhere:
    """A vLLM of the user's own.

    Attributes:
        environment: its folder, or its Python. variables: more of its environment.
    """

    environment: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def served(self, pair: Pair, target: Target, suites: list[Suite], new_tokens: int) -> dict[str, Any]:
        """Return τ there and here on the first answers to the suites' prompts, and how many texts are ours."""
        depth = pair.plan.depth
        with TemporaryDirectory(prefix="outrider-changed-") as folder:
            plain = as_plain(pair, target, Path(folder) / "target")
            drafter = pair.drafter_for(plain)
            expected = expect(plain, drafter, suites, Trial((0.0,), depth, new_tokens, None, 1))
            exported = export_drafter(drafter, plain, "vllm", Path(folder) / "export", depth).folder
            survey = Survey(expected)
            with running(
                self._launch(Path(folder) / "target", exported, drafter.name, depth), Path(folder) / "log"
            ) as e:
                survey.ask(e)
                found = survey.result(engine_facts(e), str, TOLERANCE)
        return _shown(found)

    def _launch(self, target: Path, export: Path, drafter: str, depth: int) -> VllmLaunch:
        settings = launch("vllm", drafter, str(target), str(export), depth, "float32").settings
        return VllmLaunch(python_of(self.environment), str(target), "float32", settings, environment=self.variables)


def _shown(found: ServedResult) -> dict[str, Any]:
    at_zero = found.at(0.0)
    return {
        "tau_served": shown(at_zero.served),
        "tau_own": shown(at_zero.own),
        "difference": shown(at_zero.difference),
        "identical": at_zero.identical,
        "prompts": at_zero.num_prompts,
        "suspicions": [str(s) for s in found.suspicions],
    }


def as_plain(pair: Pair, target: Target, folder: Path) -> Target:
    """Return the target again from a plain checkpoint in `folder`, which is written."""
    for module in target.model.modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "dequantize") and _is_quantised(module.weight):
            module.weight = nn.Parameter(module.weight.dequantize().float(), requires_grad=False)
    save_target(target, folder)
    return pair.load_target(str(folder))


def _is_quantised(weight: Tensor) -> bool:
    return hasattr(weight, "__tensor_flatten__")
