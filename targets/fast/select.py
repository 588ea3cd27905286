"""Choosing how a target's passes over few tokens run: the way that is right and fastest on its device.

On a GPU in bfloat16 a target tries all `CANDIDATES` at first use, on a CPU packed weights, if there is memory for them:
each must give the hidden states of the library's modules on the real weights, and those that do are timed. The fastest
is taken, and remembered by device, dtype and the model's shape in this process and in a small file, which is safe to
delete. Another target of that shape proves the remembered one right on its own weights, and times nothing. A user's
choice wins.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from pydantic import TypeAdapter

from ...common.cache_files import CacheFile
from ...common.errors import IncompatibleError, reason
from ...common.machine import clock, device_name, free_bytes
from ...common.runtime import installed_version
from .. import packed_weights
from ..backbone import by_library
from ..layers import is_of_llama_kind, usual_layer
from ..split_attention import steady_kernels
from ..target import Target
from .trial_passes import PassProbe, tolerance

try:
    from . import triton_runner
except ImportError as error:  # Triton is not installed everywhere
    _no_kernels: ImportError | None = error
else:
    _no_kernels = None

_TREE = ((-1, -1, 0, 2, 1, 0, 4),)  # parents of the drafts of one row, −1 the root: eight tokens with it
_SECONDS = 1.0
_COPIES = 2  # of a weight that products of few rows read: in blocks, and transposed
_WORTH_PACKING = 2**26  # bytes: smaller weights stay in a processor's cache
_SOFTWARE = ("outrider", "torch", "triton", "transformers")
_log = logging.getLogger("outrider")


def use_fast_pass(target: Target) -> None:
    """Let a target read a few tokens at a time by kernels of our own; prompts stay the library's.

    Raises IncompatibleError if they do not serve the model or its device, or give other numbers than the modules.
    """
    name = type(target.model).__name__
    if (why := why_no_kernels(target)) is not None:
        raise IncompatibleError(f"the fast pass does not serve {name}: {why}.")
    with by_library(target):
        fast = triton_runner.TritonRunner(target.model)
        difference = triton_runner.differs(fast, target)
    if difference is not None:
        raise IncompatibleError(
            f"the fast pass of {name} gives other numbers here than the library's modules: {difference}. Decode "
            "without it."
        )
    target.fast = fast


def why_no_kernels(target: Target) -> str | None:
    """Return why our kernels do not serve a target on its device; None if they do."""
    model = target.model
    if not is_of_llama_kind(model):
        return "it serves Llama, Mistral, Qwen2 and Qwen3 whose modules are as the library made them"
    weight = model.get_input_embeddings().weight
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"its weights are {weight.dtype}; expected bfloat16, float16 or float32"
    if _no_kernels is not None:
        return f"its kernels need Triton, which cannot be imported ({reason(_no_kernels)}); pip install triton"
    if weight.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"its kernels run on a GPU, and the model is on {weight.device}"
    return triton_runner.why_not(model)


def why_not_packed(target: Target) -> str | None:
    """Return why packed weights do not serve a target; None if they do."""
    if (why := packed_weights.why_not(target.model)) is not None:
        return why
    needed = _COPIES * _packable_bytes(target)
    free = free_bytes(target.device)
    return None if free is None or 2 * needed < free else f"packed weights need {needed:,} bytes, {free:,} are free"


def _packable_bytes(target: Target) -> int:
    return sum(weight.nbytes for weight in packed_weights.packable_weights(target.model))


@dataclass(frozen=True)
class PassCandidate:
    """A way of running passes."""

    name: str  # the target's `pass_backend` when it runs this way
    build: Callable[[Target], None]  # makes a target that runs eagerly run this way, or raises
    why_not: Callable[[Target], str | None] = lambda _: None  # the reason why it does not serve a target


EAGER = PassCandidate("eager", Target.run_eagerly)
PACKED = PassCandidate("packed", Target.pack, why_not_packed)
# The library's modules come first: all others must give their numbers.
CANDIDATES = (
    EAGER,
    PassCandidate("split attention", Target.use_split_attention),
    PACKED,
    PassCandidate("kernels", use_fast_pass, why_no_kernels),
)


@dataclass(frozen=True)
class PassTrial:
    """The result of one candidate on a device: milliseconds of a pass by its number of tokens, or a problem."""

    candidate: str
    milliseconds: dict[str, float]
    problem: str = ""

    @property
    def total(self) -> float:
        return sum(self.milliseconds.values())


@dataclass(frozen=True)
class PassSelection:
    """The candidates that were tried for models of one shape on one device, and the one that is taken."""

    device: str
    dtype: str
    shape: str
    serving: str  # the names of the candidates that serve such models
    versions: str
    taken: str
    trials: tuple[PassTrial, ...]

    @property
    def key(self) -> tuple[str, ...]:
        return self.device, self.dtype, self.shape, self.serving, self.versions

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield each candidate, and its milliseconds per pass or its problem."""
        for trial in self.trials:
            name = f"{trial.candidate} (taken)" if trial.candidate == self.taken else trial.candidate
            times = [f"{time:.3f} ms for {tokens} tokens" for tokens, time in trial.milliseconds.items()]
            yield name, ", ".join(times) or trial.problem


SELECTIONS = CacheFile("passes.json", TypeAdapter(list[PassSelection]))  # from one process to the next


def use_fastest_pass(target: Target) -> None:
    """Let a target run its passes in the fastest right way, unless its user has chosen one.

    That is for targets in bfloat16 on a GPU, and on a CPU for those whose weights do not stay in its cache.
    """
    if not _is_left_open(target):
        return
    if target.device.type == "cuda" and target.dtype == torch.bfloat16:
        choose(target)
    elif target.device.type == "cpu" and _packable_bytes(target) >= _WORTH_PACKING and why_not_packed(target) is None:
        choose(target, (EAGER, PACKED))


def _is_left_open(target: Target) -> bool:
    """Return whether a target runs as it was loaded, in rounds that can have fixed shapes and trees."""
    attention = getattr(target.config, "_attn_implementation", None)
    plain = target.pass_backend == "eager" and attention == "sdpa" and not target.sharded
    return plain and target.rewinds and target.takes_positions


def choose(
    target: Target, candidates: Sequence[PassCandidate] = CANDIDATES, now: Callable[[], float] | None = None
) -> None:
    """Let a target that runs eagerly run as the fastest candidate does; candidates are tried once for each shape.

    `now` is a clock in seconds; by default the machine's, which waits for the device.
    """
    key = _key(target, candidates)
    selection = _selections.get(key) or remembered().get(key)
    if selection is None or not _take(selection.taken, target, candidates):
        remember(measure(target, candidates, now))
    else:
        _selections[key] = selection


def measure(
    target: Target,
    candidates: Sequence[PassCandidate] = CANDIDATES,
    now: Callable[[], float] | None = None,
    seconds: float = _SECONDS,
) -> PassSelection:
    """Try all candidates, `seconds` each, on a target that runs eagerly; leave it running as the fastest right one."""
    now = now or partial(clock, target.device)
    with torch.inference_mode(), steady_kernels():
        probe = PassProbe(target, _TREE, (0,))
        trials = [_try(candidate, target, probe, now, seconds) for candidate in candidates]
    timed = [trial for trial in trials if trial.milliseconds]
    taken = min(timed, key=lambda trial: trial.total).candidate if timed else EAGER.name
    next((candidate for candidate in candidates if candidate.name == taken), EAGER).build(target)
    selection = PassSelection(*_key(target, candidates), taken, tuple(trials))
    words = "; ".join(f"{name}: {result}" for name, result in selection.rows())
    _log.info("passes on %s in %s: %s", selection.device, selection.dtype, words)
    return selection


def _try(
    candidate: PassCandidate, target: Target, probe: PassProbe, now: Callable[[], float], seconds: float
) -> PassTrial:
    """Return the result of a candidate on a target, which runs eagerly before and after."""
    if (why := candidate.why_not(target)) is not None:
        return PassTrial(candidate.name, {}, why)
    counts = (1, probe.num_nodes)
    try:
        candidate.build(target)
        if (difference := probe.error(target)) > tolerance(target.dtype):
            return _left_out(candidate, f"its hidden states are off by {difference:.2g} of their size")
        times = {str(n): probe.milliseconds(target, n, seconds / len(counts), now) for n in counts}
        return PassTrial(candidate.name, times)
    except Exception as error:  # compilers raise anything where a kernel does not compile: the others go on
        return _left_out(candidate, reason(error))
    finally:
        target.run_eagerly()


def _left_out(candidate: PassCandidate, problem: str) -> PassTrial:
    _log.warning("passes do not run by %r here: %s", candidate.name, problem)
    return PassTrial(candidate.name, {}, problem)


def _take(name: str, target: Target, candidates: Sequence[PassCandidate]) -> bool:
    """Let a target run as the candidate that was fastest before; return False if that is not right on its weights."""
    if name == EAGER.name:
        return True
    with torch.inference_mode(), steady_kernels():
        probe = PassProbe(target, _TREE, (0,))
        try:
            next(candidate for candidate in candidates if candidate.name == name).build(target)
            if probe.error(target) <= tolerance(target.dtype):
                return True
        except Exception as error:
            _log.debug("%s failed, though it was fastest before: %s", name, error)
    target.run_eagerly()
    return False


_selections: dict[tuple[str, ...], PassSelection] = {}  # of this process


def remembered() -> dict[tuple[str, ...], PassSelection]:
    """Return the selections of this process and of earlier ones, by their keys."""
    return {selection.key: selection for selection in SELECTIONS.read() or []} | _selections


def remember(selection: PassSelection) -> None:
    """Keep a selection for this process and later ones."""
    _selections[selection.key] = selection
    SELECTIONS.write(list(remembered().values()))


def _key(target: Target, candidates: Sequence[PassCandidate]) -> tuple[str, str, str, str, str]:
    """Return everything that a selection depends on, as `PassSelection.key` has it."""
    config = usual_layer(target.config)
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    shape = ", ".join(f"{name} {getattr(config, name, None)}" for name in (*sizes, "head_dim", "vocab_size"))
    serving = ", ".join(candidate.name for candidate in candidates if candidate.why_not(target) is None)
    versions = ", ".join(f"{name} {installed_version(name)}" for name in _SOFTWARE)
    dtype = str(target.dtype).removeprefix("torch.")
    return device_name(target.device), dtype, f"{config.model_type}: {shape}", serving, versions
