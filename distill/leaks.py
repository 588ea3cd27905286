"""What a recipe measures, so that nothing of it is learnt: a drafter that saw a prompt looks better than it is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ..common import BadInputError
from ..recipes import SourceSpec
from ..recipes.suites import find_suite
from .layouts import RowError, RowPrompt, understand
from .sources import rows_of


@dataclass(frozen=True)
class SuitePrompts:
    """The prompts of suites, by what a user says in them; white space does not count.

    Attributes:
        places: where each one stands, by its digest.
        allowed: whether a row that asks one of them is only counted.
    """

    places: dict[bytes, str] = field(default_factory=dict)
    allowed: bool = False

    @classmethod
    def of(cls, suites: Sequence[str], limit: int | None = None, allowed: bool = False) -> SuitePrompts:
        """Return the prompts of suites, of each the first `limit`.

        Raises:
            BadInputError: there is no such suite, or a row of it is malformed.
        """
        places: dict[bytes, str] = {}
        for name in suites:
            file = find_suite(name)[1]
            for number, row in enumerate(islice(rows_of(SourceSpec(path=str(file))), limit), 1):
                if isinstance(row, RowError):
                    raise row
                where = f"the suite {name}, row {number}"
                *_, whole = [b"", *_digests(understand(row, where).last_question().users_texts())]
                places.setdefault(whole, where)
        return cls(places, allowed)

    def found(self, asked: RowPrompt, where: str) -> str | None:
        """Return a sentence about where the same is measured; None if it is not.

        Raises:
            BadInputError: it is, and that is not allowed.
        """
        texts = asked.users_texts() if self.places else []
        place = next((self.places[digest] for digest in _digests(texts) if digest in self.places), None)
        if place is None:
            return None
        said = f"{where} asks what {place}, measures: {texts[0][:60]!r}."
        if self.allowed:
            return said
        raise BadInputError(
            f"{said} A drafter that learns what it is measured on looks better than it is: take the row out of one of "
            "them, or go on with data.allow_leaks=true."
        )


def _digests(texts: Iterable[str]) -> Iterator[bytes]:
    """Yield a digest of the first text, of the first two, …: whoever asks more has asked these, too."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(" ".join(text.split()).encode() + b"\0")
        yield digest.digest()


NO_LEAKS = SuitePrompts()
