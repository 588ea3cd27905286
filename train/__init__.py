"""Training: one trainer for every drafter, on `transformers.Trainer` and accelerate."""

from .run import TrainingInterruptedError, TrainResult, train

__all__ = ["TrainResult", "TrainingInterruptedError", "train"]
