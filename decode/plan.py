"""What a proposal looks like and how it is verified."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..ground import BadInputError
from .control import Control
from .trees import Tree

# Which rules can judge what. Sampled rules need tokens that were drawn from the drafter's distribution, places included: in a
# dynamic tree the drafter's certainty decides which of them are kept, so none of those.
ANY_SHAPE = ("greedy", "candidates", "coupled")
CHAIN_RULES = (*ANY_SHAPE, "rejection", "block")
TREE_RULES = (*ANY_SHAPE, "without_replacement", "traversal")
LOSSLESS = tuple(dict.fromkeys((*CHAIN_RULES, *TREE_RULES)))
LOSSY = ("typical",)  # changes what the target says: never chosen for anyone, and labelled in every figure
SAMPLED = ("rejection", "block", "without_replacement", "traversal")


@dataclass(frozen=True)
class Plan:
    """The shape of a proposal and how it is verified.

    Attributes:
        depth: draft tokens on a path; 0 is plain decoding.
        width: 1 drafts a chain. More grow a dynamic tree (EAGLE-2, arXiv 2406.16858): of each level the `width` most probable
            nodes are read, `width` children of each are considered, and the `nodes` most probable of all are verified.
        nodes: of a dynamic tree; None for `width * depth`.
        tree: a static tree instead; it decides the depth.
        verify: "auto", or a rule of `decode.plan.LOSSLESS` or `LOSSY`. Auto is greedy at temperature 0; above it candidates for
            proposals that are no samples (n-grams, dynamic trees), else rejection for chains and without_replacement for trees.
        confidence: a chain ends behind the first draft to which the drafter gives a lower probability than this; 0 for never.
        control: decides the depth of every round, up to `depth`, or that it drafts nothing (of a tree: the whole tree or nothing).
    """

    depth: int = 4
    width: int = 1
    nodes: int | None = None
    tree: Tree | None = None
    verify: str = "auto"
    confidence: float = 0.0
    control: Control | None = None

    def __post_init__(self) -> None:
        if self.tree is not None:
            object.__setattr__(self, "depth", self.tree.depth)
        if self.depth < 0:
            raise BadInputError(f"plan: depth must be >= 0, got {self.depth}.")
        if self.width < 1:
            raise BadInputError(f"plan: width must be >= 1, got {self.width}.")
        if self.tree is not None and (self.width > 1 or self.nodes is not None):
            raise BadInputError("plan: a static tree has its own width and number of nodes; leave out width and nodes.")
        if self.nodes is not None and (self.width == 1 or self.nodes < 1):
            raise BadInputError(
                f"plan: nodes says how many nodes of a dynamic tree are verified; it needs width > 1 and must be >= 1, got {self.nodes}."
            )
        if not 0 <= self.confidence <= 1:
            raise BadInputError(f"plan: confidence is a probability, got {self.confidence}.")
        if self.confidence and self.is_tree:
            raise BadInputError(
                "plan: confidence ends chains; a dynamic tree already follows the drafter's confidence, a static one has a fixed shape."
            )
        self._check_rule()

    def _check_rule(self) -> None:
        if self.verify not in ("auto", *LOSSLESS, *LOSSY):
            raise BadInputError(
                f"plan: unknown verification rule {self.verify!r}; known: auto, {', '.join((*LOSSLESS, *LOSSY))}."
            )
        fitting = (
            "auto",
            *LOSSY,
            *(CHAIN_RULES if not self.is_tree else ANY_SHAPE if self.tree is None else TREE_RULES),
        )
        if self.verify not in fitting:
            shape = "a chain" if not self.is_tree else "a dynamic tree" if self.tree is None else "a static tree"
            raise BadInputError(
                f"plan: the rule {self.verify!r} cannot verify {shape}; these can: {', '.join(fitting)}."
            )

    def __str__(self) -> str:
        most = "up to " if self.control is not None or self.confidence else ""
        if not self.is_tree:
            return f"depth {most}{self.depth}"
        return (
            f"{'dynamic' if self.tree is None else 'static'} tree of {most}{self.max_nodes} nodes, depth {self.depth}"
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """What `to_dict` gave."""
        tree, control = values.get("tree"), values.get("control")
        return cls(**values | {"tree": tree and Tree(tuple(tree)), "control": control and Control.from_dict(control)})

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it; a static tree is its parents."""
        return {
            "depth": self.depth,
            "width": self.width,
            "nodes": self.nodes,
            "tree": self.tree and list(self.tree.parents),
            "verify": self.verify,
            "confidence": self.confidence,
            "control": self.control and self.control.to_dict(),
        }

    @property
    def chain(self) -> Plan:
        """As deep, for a drafter that grows no trees."""
        return (
            self
            if not self.is_tree
            else Plan(
                self.depth,
                verify=self.verify if self.verify in (*CHAIN_RULES, *LOSSY) else "auto",
                control=self.control,
            )
        )

    def up_to(self, depth: int | None) -> Plan:
        """No deeper than `depth` (None: any), for a drafter that drafts no deeper."""
        if depth is None or self.depth <= depth:
            return self
        return replace(self, depth=depth, tree=self.tree and self.tree.up_to(depth))

    @property
    def is_tree(self) -> bool:
        return self.tree is not None or (self.width > 1 and self.depth > 0)

    @property
    def max_nodes(self) -> int:
        """Most draft tokens of one verification pass."""
        if self.tree is not None:
            return len(self.tree.parents)
        return self.depth if self.width == 1 else self.nodes or self.width * self.depth

    @property
    def max_read(self) -> int:
        """Most drafts that a drafter reads in one round."""
        if self.tree is not None:
            return len(self.tree.parents)
        return max(0, self.depth - 1) * self.width

    def rule(self, temperature: float, deterministic: bool) -> str:
        """The rule for a proposal that is, or is not, deterministic.

        Raises:
            BadInputError: the greedy rule above temperature 0.
        """
        if self.verify in LOSSY:
            return self.verify
        if temperature == 0:
            return "greedy"
        if self.verify == "greedy":
            raise BadInputError(f"the greedy rule needs temperature 0, got {temperature}.")
        sampled = "without_replacement" if self.tree is not None else "rejection"
        wanted = sampled if self.verify == "auto" else self.verify
        # A deterministic proposal has no distribution to reject against.
        return "candidates" if wanted in SAMPLED and (deterministic or (self.is_tree and self.tree is None)) else wanted
