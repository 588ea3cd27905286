"""A drafter's old decoding methods as a session, while they are being moved."""

from __future__ import annotations

from typing import Any

from .session import NodeSession


class LegacySession(NodeSession):
    """To be deleted."""

    def __init__(self, drafter: Any, state: Any):
        super().__init__(None, drafter.max_depth)
        self.drafter, self.state = drafter, state

    @property
    def output_ids(self) -> Any:
        return self.drafter.output_ids

    @output_ids.setter
    def output_ids(self, value: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["state"], name)

    def __getitem__(self, index: Any) -> Any:
        return LegacySession(self.drafter, self.state[index])

    def __len__(self) -> int:
        return len(self.state)

    def absorb(self, *args: Any) -> None:
        self.drafter.absorb(self.state, *args)

    def observe(self, *args: Any) -> None:
        self.drafter.observe(self.state, *args)

    def propose(self, *args: Any) -> Any:
        if hasattr(self.drafter, "propose"):
            return self.drafter.propose(self.state, *args)
        return super().propose(*args)

    def begin(self, *args: Any) -> Any:
        return self.drafter.begin(self.state, *args)

    def extend(self, *args: Any) -> Any:
        return self.drafter.extend(self.state, *args)

    def read_chain(self, *args: Any) -> Any:
        return self.drafter.read_chain(self.state, *args)

    def forget(self) -> None:
        self.drafter.forget(self.state)

    def continuations(self, *args: Any) -> Any:
        return self.drafter.continuations(self.state, *args)

    def caches(self) -> Any:
        return self.drafter.caches(self.state)

    def carried(self) -> Any:
        return self.drafter.carried(self.state)

    def carry(self, tensors: Any) -> None:
        self.drafter.carry(self.state, tensors)

    def reset(self) -> None:
        self.drafter.reset(self.state)

    def select(self, rows: Any) -> None:
        self.drafter.select(self.state, rows)
