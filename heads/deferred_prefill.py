"""Sessions that begin a round by reading what the target has processed since the last one."""

from __future__ import annotations

from torch import Tensor

from .session import NodeSession
from .tree_state import PendingInputs, required


class DeferredPrefillSession(NodeSession):
    """A session over caches of its own, which lack what was absorbed until the next round begins.

    Attributes:
        unread: None before the first `update`, and from `prefill` to the next one.
    """

    unread: PendingInputs | None = None

    def note(self, new: PendingInputs) -> None:
        """Put what was absorbed now after what is unread."""
        self.unread = new if self.unread is None else self.unread.then(new)

    def waiting(self) -> PendingInputs:
        """Return what is unread; without what is no row's, where the host may ask how much that is."""
        unread = self._absorbed()
        return unread.trimmed() if self.caches()[0].window is None else unread

    def _absorbed(self) -> PendingInputs:
        return required(self.unread, "nothing was absorbed since the last round; call absorb after each of them.")

    def carried(self) -> list[Tensor]:
        return self._absorbed().tensors()

    def carry(self, tensors: list[Tensor]) -> None:
        self.unread = PendingInputs.of(tensors)

    def reset(self) -> None:
        super().reset()
        self.unread = None

    def select(self, rows: list[int]) -> None:
        for cache in self.caches():
            cache.select(rows)
        if self.unread is not None:
            self.unread = self.unread.select(rows)
