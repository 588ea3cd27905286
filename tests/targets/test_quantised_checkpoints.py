"""A checkpoint that somebody else quantised is loaded by that library, or refused with what to do instead."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.common import BadInputError
from outrider.targets import Target

LIBRARIES = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "gptqmodel": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_whose_library_is_missing_is_refused_with_another_way(
    tiny_llama: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path, library: str
) -> None:
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed here")
    tiny_llama(vocab=len(tiny_tokenizer)).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": LIBRARIES[library]}))
    with pytest.raises(BadInputError, match=r"cannot be loaded: .*Install what it asks for; .* target\.quantize: int8"):
        Target.load(tmp_path, device="cpu")
