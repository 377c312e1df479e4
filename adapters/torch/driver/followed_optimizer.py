"""`FollowedOptimizer`: one optimizer of the state, and the parts that follow its steps."""

from __future__ import annotations

from torch import Tensor

from healcore.torch.attachment import Healing
from healcore.torch.driver.accumulation import Accumulation
from healcore.torch.driver.layer_buffers import LayerBuffers
from healcore.torch.driver.pending_step import Recorder
from healcore.torch.measurement import StepNorms


class FollowedOptimizer:
    """One optimizer of the state. It is the `StepListener` of the optimizer's healed step.

    The driver has one part for each question about a step:

        judged  ─► Recorder       keeps the step, which the run reads some batches later
        ended   ─► LayerBuffers   saves or restores what the forward pass has written
        stepped ─► Accumulation   no gradient is left that no step has used

    It refers to these parts and not to the driver, because hooks of the optimizer refer to it, and
    Python does not collect a cycle through these hooks.

    Attributes:
        name: name of the optimizer in the state.
        healing: the handle of the optimizer.
        recorder: keeps the judged steps of this optimizer.
        accumulation: knows the gradients since the last step of this optimizer.
        buffers: the buffers of the layers that this optimizer trains, or None without such layers.
            The driver replaces them when the structure of the model changes.
    """

    def __init__(
        self, name: str, healing: Healing, recorder: Recorder, accumulation: Accumulation
    ) -> None:
        self.name = name
        self.healing = healing
        self.recorder = recorder
        self.accumulation = accumulation
        self.buffers: LayerBuffers | None = None

    def judged(self, norms: StepNorms) -> None:
        """See `StepListener.judged`."""
        self.recorder.record(norms)

    def ended(self, skipped: bool | Tensor) -> None:
        """See `StepListener.ended`."""
        self.accumulation.has_ended = True
        if self.buffers is not None:
            self.buffers.on_step_ended(skipped)

    def stepped(self) -> None:
        """See `StepListener.stepped`."""
        self.accumulation.on_step()
