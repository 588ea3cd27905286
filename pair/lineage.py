"""Where the versions of pairs come from: each after the version that it was refreshed from, with what it achieved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .manifest import Headline, Manifest


@dataclass
class VersionNode:
    """A version, and the versions that were made from it.

    Attributes:
        missing: the parent's name and version where that is not among the versions; None where it is, or where there
            is no parent.
    """

    manifest: Manifest
    missing: str | None = None
    children: list[VersionNode] = field(default_factory=list)


def lineage(manifests: Sequence[Manifest]) -> list[VersionNode]:
    """Return the versions as trees: those without a parent here, each with its descendants, in the order given."""
    known = {manifest.digest for manifest in manifests}
    children: dict[str, list[Manifest]] = defaultdict(list)
    roots: list[Manifest] = []
    for manifest in manifests:
        parent = manifest.lineage.parent
        # A pair cannot be its own ancestor: its digest would have to be known before it was made. A forged one can.
        if parent is None or parent.digest not in known or parent.version >= manifest.version:
            roots.append(manifest)
        else:
            children[parent.digest].append(manifest)
    return [_node(root, children, known) for root in roots]


def _node(manifest: Manifest, children: dict[str, list[Manifest]], known: set[str]) -> VersionNode:
    parent = manifest.lineage.parent
    missing = None if parent is None or parent.digest in known else f"{parent.name} version {parent.version}"
    root = VersionNode(manifest, missing)
    open_nodes = [root]
    while open_nodes:  # not recursive: a lineage may have hundreds of versions
        node = open_nodes.pop()
        node.children = [VersionNode(child) for child in children.pop(node.manifest.digest, [])]
        open_nodes += node.children
    return root


def headline_text(headline: Headline) -> str:
    """Return τ and speedup at one temperature in words."""
    tau, speedup = headline.tau, headline.speedup
    shown = "τ –" if tau.value is None else f"τ {tau.value:.2f} [{tau.low:.2f}, {tau.high:.2f}]"
    faster = "" if speedup.value is None else f", {speedup.value:.2f}×"
    return f"{shown}{faster} at temperature {headline.temperature:g}"
