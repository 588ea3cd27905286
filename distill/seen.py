"""A set of texts that remembers 8 bytes of each, for data of millions of rows."""

from __future__ import annotations

import hashlib

import numpy as np

_FREE = 0


class Seen:
    """What was seen before, by digests: an array in which each one lies at its place, or at the next free one.

    Two of ten million different texts share a digest of 64 bits with a chance of 1 in 370,000.
    """

    def __init__(self) -> None:
        self._places = np.zeros(1024, dtype=np.uint64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, text: str) -> bool:
        """Remember a text, and tell whether it is new."""
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1
        place = self._place(digest)
        if self._places[place] != _FREE:
            return False
        self._places[place] = digest
        self._count += 1
        if 2 * self._count > len(self._places):
            self._grow()
        return True

    def _place(self, digest: int) -> int:
        """Return where a digest lies, or would lie."""
        last = len(self._places) - 1  # their number is a power of two
        place = digest & last
        while self._places[place] not in (_FREE, digest):
            place = (place + 1) & last
        return place

    def _grow(self) -> None:
        known = self._places[self._places != _FREE]
        self._places = np.zeros(2 * len(self._places), dtype=np.uint64)
        for digest in known.tolist():
            self._places[self._place(digest)] = digest
