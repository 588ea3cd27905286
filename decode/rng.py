"""Counter-based randomness: each uniform is a hash of (seed, stream, keys), and no generator state exists.

A draw does not depend on what else is in the batch, on the order of calls, or on how many drafts were thrown away.
"""

from __future__ import annotations

import logging
from itertools import product

import torch
from torch import Tensor

try:
    from . import rng_kernel
except ImportError:  # without Triton torch computes them
    rng_kernel = None  # type: ignore[assignment]

Seed = int | Tensor  # a tensor [] where a captured graph must serve every seed

_MULTIPLIERS = (-4658895280553007687, -7723592293110705685)  # splitmix64's two, as signed 64-bit integers
_GOLDEN = -7046029254386353131
_MOST_KEYS, _MOST_DIMENSIONS = 4, 3  # that the kernel takes
_log = logging.getLogger("outrider")


def uniforms(seed: Seed, stream: int, *keys: Tensor) -> Tensor:
    """Return uniforms in (0, 1), fp64, of the keys' broadcast shape: a hash of (seed, stream, keys).

    On a GPU one kernel computes it, where torch would launch dozens.
    """
    if keys[0].is_cuda and _by_kernel(keys):
        return _kernel(seed, stream, keys)
    return uniforms_by_torch(seed, stream, *keys)


def uniforms_by_torch(seed: Seed, stream: int, *keys: Tensor) -> Tensor:
    """Return the same by operations of torch, which run everywhere."""
    state = _mix(seed_on(keys[0].device, seed) * 1_000_003 + (stream + _GOLDEN))
    for key in keys:
        state = _mix(state + (key + 1) * _GOLDEN)
    return (((state >> 11) & 0x1FFFFFFFFFFFFF).double() + 0.5) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser to int64 (products wrap around; shifts are made logical by masking)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MULTIPLIERS[0]
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MULTIPLIERS[1]
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def seed_on(device: torch.device, seed: Seed) -> Tensor:
    """Return the seed, modulo 2**64, as a number `[]` on `device`: filled in there, never copied."""
    if isinstance(seed, Tensor):
        return seed
    return torch.full((), (seed + 2**63) % 2**64 - 2**63, dtype=torch.long, device=device)


_proven: dict[torch.device, bool] = {}


def _by_kernel(keys: tuple[Tensor, ...]) -> bool:
    """Return whether the kernel serves these keys. Its results are checked once, and never during a capture."""
    device = keys[0].device
    fitting = len(keys) <= _MOST_KEYS and all(k.dtype == torch.long and k.ndim <= _MOST_DIMENSIONS for k in keys)
    if not fitting or rng_kernel is None:
        return False
    if isinstance(keys[0], torch._subclasses.FakeTensor):
        return True
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if device not in _proven and not capturing:
        _proven[device] = _proves_right(device)
    return _proven.get(device, False)


def _proves_right(device: torch.device) -> bool:
    """Return whether the kernel gives on this device the same bits as torch."""
    try:
        wrong = differs(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's errors for a kernel that does not compile have no common class: torch goes on
        wrong = (str(error).strip() or type(error).__name__).splitlines()[0]
    if wrong:
        _log.warning("the kernel of uniforms is not used on %s, torch computes them: %s", device, wrong)
    return not wrong


def differs(device: torch.device) -> str:
    """Return how the kernel differs from torch on `device`, as part of a sentence; "" if every bit is the same."""
    rows = torch.tensor([[0], [1], [7], [2**40], [-1], [2**63 - 1]], device=device)
    places, tokens = torch.arange(3, device=device), torch.arange(300, device=device)
    cases = ((rows[:, 0],), (rows, places), (rows[:, None], rows[:, None], places[:, None], tokens))
    for seed, keys in product((0, -1, 2**63 - 1), cases):
        if not torch.equal(_kernel(seed, 4, keys), uniforms_by_torch(seed, 4, *keys)):
            return f"it gives other numbers for seed {seed} and {len(keys)} keys"
    return ""


def _kernel(seed: Seed, stream: int, keys: tuple[Tensor, ...]) -> Tensor:
    return rng_kernel.uniforms(seed_on(keys[0].device, seed), stream, list(keys))
