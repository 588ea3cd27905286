"""The table of formats in the documentation is what the layouts say; the round-trip test has its rows as cases."""

from __future__ import annotations

import os
from pathlib import Path

from outrider.formats import LAYOUTS
from outrider.heads import drafter_config
from outrider.targets import Target

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "support.md"
BEGIN, END = "<!-- written by tests/formats/test_table.py -->\n", "<!-- end -->"
# Settings that some engine cannot serve, by drafter: the table says which, and what it serves instead.
UNUSUAL = {
    "eagle3": [{norm: True} for norm in ("norm_taps", "norm_output", "norm_before_fc", "norm_before_residual")]
    + [{"num_layers": 2}, {"taps": [3]}],
    "eagle1": [
        {"embedding_scale": 16, "feature_scale": 0.5},
        {"fc_bias": True},
        {"norm_first": True},
        {"num_layers": 2},
        {"draft_vocab_size": 100},
    ],
    "medusa": [
        {"bias": True},
        {"share_lm_head": True},
        {"draft_vocab_size": 100},
        {"draft_vocab_size": 100, "share_lm_head": True},
    ],
    "mtp": [{"hidden_first": True}, {"recursive": False, "depth": 2}, {"draft_vocab_size": 100}],
    "self_speculative": [{"num_blocks": 1}, {"num_blocks": 0, "share_lm_head": False}],
    "peagle": [{"norm_taps": True}, {"norm_before_fc": True}, {"taps": [5, 3]}],
    "dflash": [
        {"draft_vocab_size": 100},
        {"causal": True},
        {"from_anchor": True},
        {"sliding_window": 8},
        {"sliding_window": 8, "window_from": "anchor", "causal": True},
    ],
    "dflash2": [
        {"draft_vocab_size": 100},
        {"causal": True},
        {"from_anchor": True},
        {"sliding_window": 8},
        {"conv_kernel_size": 3, "selector_top_k": 8},
    ],
    "lilicorr": [
        {"draft_vocab_size": 100},
        {"causal": True},
        {"from_anchor": True},
        {"sliding_window": 8},
        {"conv_kernel_size": 2, "conv_group_size": 16},
        {"lilicorr_candidate_topk": 12},
    ],
    "dspark": [{"draft_vocab_size": 100}, {"markov_head": "gated"}, {"markov_rank": 0}, {"from_anchor": False}],
    "draft_model": [],
    "tli": [{"pieces": 0}, {"pieces": 4}],
    "uno": [{"mask_token_id": 1}],
}
PLAIN = {"eagle3": {"taps": [1, 3, 5]}, "self_speculative": {"num_blocks": 0}}


def said(settings: dict[str, object]) -> str:
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in settings.items())


def row(to: str, kind: str, target: Target) -> str:
    layout = LAYOUTS[to][kind]
    served = []
    refused = []
    for settings in UNUSUAL[kind]:
        _, config = drafter_config({"type": kind} | PLAIN.get(kind, {}) | settings)
        lacks = layout.lacks(config, target.num_layers)
        (refused if lacks else served).append((settings, lacks))
    yes = ", ".join(f"`{said(settings)}`" for settings, _ in served) or "–"
    no = "; ".join(f"`{said(settings)}` → {lacks[0].nearest}" for settings, lacks in refused) or "–"
    return f"| {to} | {kind} | {layout.name} | {yes} | {no} |"


def test_the_table_of_formats_is_what_the_layouts_say(target):
    """With OUTRIDER_WRITE_TABLES=1 in the environment the table is written anew."""
    rows = [row(to, kind, target) for to, layouts in LAYOUTS.items() for kind in layouts]
    head = ["| `--to` | drafter | layout | serves, too | refused → nearest that is served |", "|---|---|---|---|---|"]
    table = "\n".join([*head, *rows]) + "\n"
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    if os.environ.get("OUTRIDER_WRITE_TABLES"):
        PAGE.write_text(before + BEGIN + table + END + rest.split(END)[1], encoding="utf-8")
    else:
        assert rest.split(END)[0] == table
