"""A drafter's acceptance in the forms that others read: written from a report, read back, and checked."""

from .claims import Claims, Contradiction, contradictions
from .forms import FORMS, read_claims
from .passport import Passport

__all__ = ["FORMS", "Claims", "Contradiction", "Passport", "contradictions", "read_claims"]
