"""Training: one trainer for every drafter, on `transformers.Trainer` and accelerate."""

from typing import TYPE_CHECKING

from ..common.lazy import lazily

if TYPE_CHECKING:
    from .run import TrainingInterruptedError, TrainResult, train
else:
    __getattr__ = lazily(__name__, __file__)

__all__ = ["TrainResult", "TrainingInterruptedError", "train"]
