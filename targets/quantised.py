"""Targets with weights of eight bits, as they may be served: a quantised target is another target.

torchao changes the linear layers, all but the output embedding, after an adapter was merged. The drafter reads the
hidden states of the quantised model, and drafts for that one.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, Literal, get_args

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..common.errors import BadInputError

Kind = Literal["int8", "int8-dynamic"]
# torchao's name for each: weights alone, or the products' other side as well, row by row.
_CONFIGS: Final = {"int8": "Int8WeightOnlyConfig", "int8-dynamic": "Int8DynamicActivationInt8WeightConfig"}


def quantise(model: PreTrainedModel, kind: str) -> None:
    """Quantise the linear layers of `model` in place, as `kind` says.

    Raises:
        BadInputError: no such kind, or torchao is not installed.
    """
    if kind not in _CONFIGS:
        raise BadInputError(f"quantize: expected one of {', '.join(get_args(Kind))}, found {kind!r}.")
    library, output = _library(), model.get_output_embeddings()
    config = getattr(library, _CONFIGS[kind])()

    def chosen(module: nn.Module, _name: str) -> bool:
        return isinstance(module, nn.Linear) and module is not output

    library.quantize_(model, config, filter_fn=chosen)


def parts(tensor: Tensor) -> tuple[dict[str, Tensor], Any] | None:
    """Return the plain tensors that a quantised one is made of, and what else it holds; None for a plain one."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return None
    names, rest = flatten()
    return {name: getattr(tensor, name) for name in names if getattr(tensor, name) is not None}, rest


def _library() -> Any:
    try:
        return importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise BadInputError("quantised targets need torchao: pip install 'outrider[quantised]'.") from error
