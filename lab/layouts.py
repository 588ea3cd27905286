"""The export layouts of the lab's drafters, by `--to` and drafter."""

from __future__ import annotations

from ..formats.base_layout import ExportLayout
from .lilicorr_layouts import LAYOUTS as LILICORR
from .peft_lora import PeftLora
from .tli_layouts import VllmTli

LAYOUTS: dict[str, dict[str, ExportLayout]] = {
    **LILICORR,
    "vllm": LILICORR["vllm"] | {"tli": VllmTli()},
    "peft": {"uno": PeftLora()},
}
