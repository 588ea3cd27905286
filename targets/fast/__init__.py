"""Passes over few tokens, in the way that is right and fastest on a device.

`select` chooses between the library's modules, split attention, packed weights and kernels of our own (Triton), by
passes of `trial_passes`. Of the kernels, `triton_runner` runs the layers of Llama-like targets, by `matmuls` that are
tuned and by `custom_ops`, which are the `kernels` as torch knows them, once they were compared with the library's
modules.
"""

from ..backbone import by_library
from .select import use_fast_pass, use_fastest_pass

__all__ = ["by_library", "use_fast_pass", "use_fastest_pass"]
