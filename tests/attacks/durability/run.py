"""The attacks on what Outrider writes and reads back; the figures go to a file, and a table of them to the terminal.

    python tests/attacks/durability/run.py kills alterations writers --out docs/security/durability.json

All is decided by --seed. Needs Linux and a C compiler for the kills.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the world that all attacks share

from harness import under_interposition


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="+", choices=["kills", "faults", "alterations", "writers"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the usual number of attempts")
    parser.add_argument("--only", action="append", help="a verb or a subject; may be repeated")
    parser.add_argument("--out", type=Path, help="a JSON file; other attacks, verbs and subjects in it stay")
    given = parser.parse_args()
    root = Path(os.environ.get("OUTRIDER_ATTACK") or tempfile.mkdtemp(prefix="outrider-attack-"))
    under_interposition(root)
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    try:
        found = {name: attack(name, root, given) for name in given.attacks}
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if given.out:
        before = json.loads(given.out.read_text()) if given.out.exists() else {}
        kept = {name: [r for r in before.get(name, []) if titles(r) not in map(titles, found[name])] for name in found}
        given.out.write_text(json.dumps(before | {n: kept[n] + found[n] for n in found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return int(any(row["failures"] for rows in found.values() for row in rows))


def titles(row: dict) -> str:
    """Return what a row is about: its first entry after the seed."""
    return str(next(value for key, value in row.items() if key != "seed"))


def attack(name: str, root: Path, given: argparse.Namespace) -> list[dict]:
    """Run one kind of attack and return its rows."""
    import datasets
    import torch
    from alterations import run_alterations
    from faults import run_faults
    from kills import run_kills
    from writers import run_writers

    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    run = {"kills": run_kills, "faults": run_faults, "alterations": run_alterations}.get(name)
    rows = run(root, given.seed, given.share, given.only) if run else run_writers(root)
    return [{"seed": given.seed} | asdict(row) for row in rows]


if __name__ == "__main__":
    sys.exit(main())
