"""The ground floor: what every room needs and none owns. It imports no other room.

`errors` and `values` (what a user may get wrong), `files` (whole files or none), `progress` (bars on a terminal),
`signals` (requests to stop), `versions` (of the software), `allocation` (how a process holds memory), and `machine`
(device, clock, free memory; the only one that imports torch).
"""

from .errors import BadInputError, IncompatibleError, OutriderError, refuse_unknown_keys

__all__ = ["BadInputError", "IncompatibleError", "OutriderError", "refuse_unknown_keys"]
