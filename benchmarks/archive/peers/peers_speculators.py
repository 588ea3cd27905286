"""The EAGLE-3 of the `speculators` package as a contestant of `bench.peers`. The one file that imports it."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from torch import Tensor, nn
from transformers import AutoConfig

from outrider.formats import load_speculators
from outrider.heads import Drafter
from outrider.targets import embedded_path

from .peers_training import THEIRS, Row, Settings

VERSION = version("speculators")


class Speculators:
    """Its head, made and trained by its own functions: `from_training_args`, `shift_batch`, `CollateFn`, `forward`."""

    def __init__(self, settings: Settings, attention: str):
        self.name, self.settings = f"{THEIRS}, {attention}", settings
        ours = settings.head()
        path = settings.target.source.get("path", "embedded")
        path = str(embedded_path()) if path == "embedded" else str(path)
        self.module: Any = _silently(lambda: _make(path, ours.config, ours.token_ids, attention))
        self.module.train()
        self.options = {
            "ttt_steps": settings.steps,
            "ttt_step_loss_decay": settings.decay,
            "loss_config": resolve_loss_config("kl_div", "eager"),
        }

    def loss(self, rows: Sequence[Row]) -> Tensor:
        return self.module(**packed(rows), **self.options)[1]

    def drafter(self) -> Drafter:
        with tempfile.TemporaryDirectory() as folder:
            _silently(lambda: self.module.save_pretrained(folder))
            return load_speculators(Path(folder), self.settings.target)


def packed(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Make a batch as its trainer does: rows shifted against their features, one after the other, none cut or padded.

    Its mask names the token that an entry reads, ours the one that is predicted after it: shifted here so that both
    learn the same ones.
    """
    samples = [
        {
            "input_ids": row.tokens,
            "hidden_states": row.hidden.flatten(1),
            "verifier_last_hidden_states": row.unnormed,
            "loss_mask": nn.functional.pad(row.learned[1:], (0, 1)),
            "lengths": torch.tensor([len(row.tokens)]),
            "position_ids": torch.arange(len(row.tokens)),
        }
        for row in rows
    ]
    hidden = rows[0].hidden
    collate = CollateFn(
        sum(len(row.tokens) - 1 for row in rows), hidden.shape[-1], hidden.shape[-2], hidden.dtype, shift_batch
    )
    batch = collate(samples)
    return {name: value for name, value in batch.items() if isinstance(value, Tensor)}


def _make(path: str, config: Any, token_ids: Tensor, attention: str) -> Any:
    """A new head of the same sizes and options as ours, with its weights from the current seed."""
    layer = AutoConfig.from_pretrained(path, trust_remote_code=False)
    layer.num_hidden_layers, layer.dtype = config.num_layers, torch.float32
    kept = torch.zeros(config.vocab_size, dtype=torch.bool)
    kept[token_ids] = True
    return Eagle3DraftModel.from_training_args(
        layer,
        t2d=kept,
        d2t=token_ids - torch.arange(len(token_ids)),
        target_layer_ids=list(config.taps),
        draft_attn_impl=attention,
        draft_vocab_size=len(token_ids),
        ttt_steps=config.steps,
        verifier_name_or_path=path,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.norm_taps,
        norm_output=config.norm_output,
    )


def _silently(make: Any) -> Any:
    """Its notes about files it has read are no part of the figures."""
    try:
        from loguru import logger

        logger.disable("speculators")
    except ImportError:
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()
