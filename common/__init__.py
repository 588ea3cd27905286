"""What every room needs and none owns. It imports no other room.

`errors` and `values` (what a user may get wrong), `files` and `atomic` (whole files and folders or none), `disk`
(whether they can be written), `locks` (one writer), `process_group` (the processes of one launch), `leftovers` (of dead
processes), `digests` and `digest_cache` (what was written is what is read), `progress` (bars on a terminal), `signals`
(requests to stop), `versions` (of the software), `allocation` (how a process holds memory), and `machine` (device,
clock, free memory; the only one that imports torch).
"""

from .errors import BadInputError, IncompatibleError, OutriderError, Refusal, refuse_unknown_keys

__all__ = ["BadInputError", "IncompatibleError", "OutriderError", "Refusal", "refuse_unknown_keys"]
