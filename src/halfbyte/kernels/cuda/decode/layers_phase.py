"""All layers of a decode step in one launch, for an engine that keeps the pages, the last norm and the head: vLLM.

The same kernel as the whole step's (`phase.py`), compiled to find the pages of every layer by themselves and to end
with the residual stream. Refuses what that refuses.
"""

from __future__ import annotations

from dataclasses import replace

from halfbyte.kernels.cuda.decode.phase import WholeStep, run_step, step_weights
from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import ALL_LAYERS, Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.step import Step


class AllLayers(WholeStep):
    name = "cuda.decode_layers"
    covers = ALL_LAYERS  # type: ignore[assignment]
    dense = ("qkv", "o")

    def shape(self, spec: Spec, arch: Arch, rows: int) -> StepShape:
        """The format of a head that it does not have is the others', so that it changes nothing."""
        return replace(shape := super().shape(spec, arch, rows), lent=True, lm_head=shape.qkv)

    def bind(self, b: Binding) -> Launch:
        assert b.layer_pools is not None, "an engine that lends its pages says where those of each layer are"
        step_for = self.steps(b, step_weights(b, head=False), b.layer_pools)

        def launch(step: Step, acts: Activations) -> None:
            acts.x = run_step(step_for, step)[0].residual[: step.rows]

        return launch


PHASES: tuple[Phase, ...] = (AllLayers(),)
