"""What every room needs and none owns. It imports no other room.

`errors` and `values` (what a user may get wrong), `atomic` (files and folders that are written whole or not at all),
`safe_load` (untrusted text, JSON and YAML), `locks` (one writer), `digests` and `digest_cache` (what was written is
what is read), `process_group` (the processes of one launch), `signals` (requests to stop), `progress` (bars on a
terminal), `runtime` (versions of the software, and how a process holds memory), and `machine` (device, clock, free
memory; it imports torch).
"""

from .errors import BadInputError, IncompatibleError, OutriderError, Refusal, refuse_unknown_keys

__all__ = ["BadInputError", "IncompatibleError", "OutriderError", "Refusal", "refuse_unknown_keys"]
