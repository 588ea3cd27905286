"""`outrider lab`: the verbs of the lab, registered as a group of the command."""

from __future__ import annotations

from typing import Any

import typer

from ..scripts.help_examples import examples_by_verb
from ..scripts.verb_group import VerbGroup
from .candidates_verb import candidates
from .capacity import capacity
from .fleet_verb import fleet
from .gate_verb import gate
from .grow_verb import grow
from .learn_verb import learn
from .replay_verb import replay
from .report_verb import report
from .search_verb import search
from .transplant_verb import transplant
from .vocabulary_verb import vocab
from .watch_verb import watch

_EXAMPLES = """
outrider lab vocab embedded-eagle3 --size 1024 --size 2048
outrider lab candidates runs/pair-v1 --out runs/candidates --rank 64 --candidates 64
outrider lab capacity runs/pair-v1 --arrivals 2 --arrivals 20
outrider lab capacity runs/pair-v1 --arrivals 20 --latency 1.5 --max-batch 64 --json
outrider lab fleet runs/pair-v1 --adapters path/to/adapters --out runs/fleet
outrider lab replay runs/pair-v1 --limit 5
outrider lab replay runs/pair-v1 --to vllm --export runs/vllm
outrider lab report runs/pair-v1 --to modelopt --to vllm --out runs/forms
outrider lab report --check runs/forms/speculation_profile.json
outrider lab report runs/pair-v1 runs/v2/pair --out runs/trend
outrider lab search embedded-eagle3 embedded-eagle1 --candidates 36 --budget 180
outrider lab gate runs/v2/pair --against runs/pair-v1
outrider lab grow embedded --like 0.4b --out runs/grown
outrider lab grow path/to/target --like 8b --out runs/grown --drafter path/to/drafter num_hidden_layers=8
outrider lab learn learn.yaml
outrider lab learn learn.yaml --now
outrider lab learn learn.yaml --canary --json
outrider lab transplant path/to/draft-model path/to/target --out runs/draft-model
outrider lab watch http://127.0.0.1:8000 --pair runs/pair-v1 --json
outrider lab watch http://127.0.0.1:8000 --once --state watch.json
"""

lab_app = typer.Typer(no_args_is_help=True, help="Young or rare tools, and tools for authors of drafters.")
for _verb in (candidates, capacity, fleet, gate, grow, learn, replay, report, search, transplant, vocab, watch):
    lab_app.command()(_verb)


def _bodies() -> dict[str, Any]:
    from .json_bodies import BODIES

    return BODIES


VERBS = VerbGroup(lab_app, examples_by_verb(_EXAMPLES, ("lab",)), _bodies, speaking=("learn", "watch"))
