"""`outrider lab grow`: a small model grown into one of a real size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..common import BadInputError
from ..common.places import require_new, require_outside
from ..scripts.output import print_lines


def grow(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A small target: a folder, a Hub id, or 'embedded'.")],
    like: Annotated[str, typer.Option(help="The model whose class and sizes it gets: 0.4b, 1b, 8b, 70b, qwen3-8b, …")],
    out: Annotated[Path, typer.Option(help="A new folder, which transformers, vLLM and llama.cpp read.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Sizes of its config: num_hidden_layers=8.")
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option(help="A drafter of SOURCE: it is grown with it, into OUT/drafter.")
    ] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(min=1, help="Outputs of the grown drafter (default: all, if it has all of SOURCE's).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "bfloat16",
) -> None:
    """Grow a small model into one of a real size: the same text and the same drafts, at the real cost of a pass."""
    require_outside(out, "the grown model")
    from ..common.atomic import replacing_folder, require_space
    from ..common.locks import locked
    from ..heads import load_drafter
    from ..targets import Target
    from .grow import grow as grow_model
    from .grow import grown_bytes, shape_config, shape_for
    from .grow_drafter import grow_drafter

    sizes = _sizes(changes or [])
    shape_config(like, **sizes)  # refused before anything is loaded
    with locked(out):  # from here on: a refused run, too, clears what a dead one left
        require_new(out, "the grown model")
        small = Target.load(source, dtype=dtype, device="cpu")
        shape = shape_for(small.model.config, like, **sizes)
        require_space(out, grown_bytes(small.model, shape), "Take a smaller shape, or another disk.")
        large = Target(grow_model(small.model, shape), small.tokenizer)
        head = None if drafter is None else grow_drafter(load_drafter(drafter, small), small, large, draft_vocab)
        with replacing_folder(out) as building:
            large.model.save_pretrained(building)
            small.require_tokenizer().save_pretrained(building)
            if head is not None:
                head.save(building / "drafter")
    count = sum(weight.numel() for weight in large.model.parameters())
    lines = [f"[green]✓[/green] {escape(str(out))}: {type(large.model).__name__} of {count / 1e9:.2f}B parameters"]
    if drafter is not None:
        lines.append(f"[green]✓[/green] {escape(str(out / 'drafter'))}: drafts as {escape(str(drafter))} does")
    print_lines(lines)


def _sizes(changes: list[str]) -> dict[str, int]:
    """Return sizes by name; `shape_config` refuses names that no config has."""
    sizes: dict[str, int] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if not (value.isascii() and value.isdecimal() and len(value) < 16):
            raise BadInputError(f"expected KEY=VALUE with a whole number, as in num_hidden_layers=8; got {change!r}.")
        sizes[name] = int(value)
    return sizes
