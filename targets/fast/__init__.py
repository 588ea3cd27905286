"""Passes over few tokens through targets of Llama's kind, by kernels of our own (Triton).

`body` runs the layers, by `products` that are chosen by trying and by `operations`, which are the `kernels` as torch
knows them. `taking` imports them when they are asked for: `triton` is not installed everywhere. `proof` holds them
against the library's modules on the device at hand.
"""

from .select import Fast, by_library, prefer_fast_pass, use_fast_pass

__all__ = ["Fast", "by_library", "prefer_fast_pass", "use_fast_pass"]
