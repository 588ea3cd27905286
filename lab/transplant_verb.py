"""`outrider lab transplant`: a draft model with another tokenizer, given the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..common.places import require_new, require_outside
from ..scripts.output import print_lines


def transplant(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The draft model: a folder, a .gguf, or a Hub id.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The target whose tokenizer it gets.")],
    out: Annotated[Path, typer.Option(help="A new folder, to be a drafter's `path`.")],
) -> None:
    """Give a draft model the target's tokenizer: shared tokens keep their embeddings, others get means of pieces'."""
    require_outside(out, "the draft model")
    from ..common.atomic import replacing_folder
    from ..common.locks import locked
    from ..targets import Target
    from ..targets.config_only import config_only_target
    from .transplant import transplant as transplanted

    with locked(out):
        require_new(out, "the draft model")
        theirs = config_only_target(target)
        own = Target.load(model, dtype="float32", device="cpu")
        changed, shared = transplanted(own.model, own.require_tokenizer(), theirs)
        with replacing_folder(out) as building:
            changed.save_pretrained(building)
            theirs.require_tokenizer().save_pretrained(building)
    size = len(theirs.require_tokenizer())
    print_lines(
        [
            f"[green]✓[/green] {escape(str(out))}: {shared:,} of the target's {size:,} tokens ({shared / size:.0%}) "
            "are one token in both; the others have means of their pieces'.",
            f"Train it before it drafts: drafter: {{type: draft_model, path: {escape(str(out))}}}",
        ]
    )
