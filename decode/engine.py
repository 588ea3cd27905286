"""The lossless speculative decoder: one loop for every drafter, every rule, and for no drafter at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..heads import Drafter
from ..targets import Target
from ..targets.fast import use_fast_pass, use_fastest_pass
from .plan import Plan
from .run import Output, Request, Run, Stop, StreamEvent
from .sampling import Sampling
from .static_batch import StaticBatches


class Decoder:
    """A decoder of a target, with a drafter if there is one.

    Args:
        drafter: None gives the plain target in the same engine: the baseline of every speedup.
        static: rounds of fixed shapes, captured as CUDA graphs on a GPU (see `decode.room`). None for on a GPU, where
            drafter and target allow it.
        fast: whether the target reads few tokens at a time by kernels of our own. None for the way that is right and
            fastest on its device (see `targets.fast`), which on a CPU is the library's modules. A target that has
            taken another way keeps it.

    Raises:
        IncompatibleError: the drafter cannot draft for this target (taps, sizes, vocabulary), or the fast pass is asked
            for and does not serve it.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, static: bool | None = None, fast: bool | None = None
    ):
        self.target, self.drafter = target, drafter
        on_gpu = target.device.type == "cuda" and not target.sharded
        if fast:
            use_fast_pass(target)
        elif fast is None:
            use_fastest_pass(target)
        self.rooms = StaticBatches(target, on_gpu if static is None else static)
        if drafter is not None:
            drafter.check(target)
            drafter.to(target.device).eval()

    @property
    def static(self) -> bool:
        """Whether rounds have fixed shapes, where drafter and target allow it."""
        return self.rooms.wanted

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        plan: Plan | None = None,
        stop: Stop | None = None,
        ignore_eos: bool = False,
        sequence_ids: Sequence[int] | None = None,
        speculate: bool | Sequence[bool] = True,
    ) -> Output:
        """Complete all `prompts` (token ids, of any lengths) in one batch.

        Args:
            stop: called with a sequence's new tokens after each token; True ends it there.
            sequence_ids: what keys each prompt's randomness (default: its index), so that a prompt gets the same text
                in whatever batch it runs. (Above temperature 0 a plan's controller looks at the whole batch: then only
                under the coupled rule.)
            speculate: False decodes plainly, whatever the plan; a sequence of flags says it for each prompt.

        Raises:
            BadInputError: an empty prompt, a prompt that leaves no room in the target's context, more than memory
                holds, or a place at which `sampling` forbids every token.
            IncompatibleError: the plan drafts trees, and the target cannot verify them.
        """
        how = (sampling or Sampling(), plan or Plan(), stop, ignore_eos, sequence_ids, speculate)
        run = self.run(Request(prompts, max_new_tokens, *how))
        for _ in run.steps():
            pass
        return run.output()

    def stream(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        plan: Plan | None = None,
        stop: Stop | None = None,
        ignore_eos: bool = False,
        speculate: bool = True,
    ) -> Iterator[StreamEvent]:
        """Complete one prompt, yielding what each round emits."""
        how = (sampling or Sampling(), plan or Plan(), stop, ignore_eos, None, speculate)
        for events in self.run(Request([prompt], max_new_tokens, *how)).steps():
            yield events[0]

    def run(self, request: Request) -> Run:
        """Prepare one generation; its steps are taken by whoever iterates over them."""
        return Run(self.target, self.drafter, request, self.rooms)
