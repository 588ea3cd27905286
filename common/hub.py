"""The form of a Hub repository's id, and what the Hub's library says when it fails, as one line."""

from __future__ import annotations

import re

from huggingface_hub import HfApi, get_token

from .errors import first_line
from .http_client import without_key

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")  # ORG/NAME
HUB_ADVICE = "Check the name, the network and your access (`hf auth login`)."
_LONGEST = 400  # letters of what the library says


def hub_reason(error: Exception, api: HfApi) -> str:
    """Return the first line of what the Hub's library raised, without the key, as a sentence."""
    key = api.token if isinstance(api.token, str) else get_token()
    return without_key(first_line(error), key)[:_LONGEST].rstrip(".") + "."
