"""`DriverListener`: passes the steps of one optimizer on to the parts of the driver."""

from __future__ import annotations

from torch import Tensor

from healcore.torch.driver.accumulation import Accumulation
from healcore.torch.driver.batch_statistics import BatchStatistics
from healcore.torch.driver.pending_step import Recorder


class DriverListener:
    """The `StepListener` of one optimizer that belongs to a Healer.

    The driver has one part for each question about a step:

        judged  ─► Recorder          keeps the step, which the run reads some batches later
        ended   ─► BatchStatistics   saves or restores what the forward pass has written
        stepped ─► Accumulation      no gradient is left that no step has used

    It refers to these parts and not to the driver, because hooks of the optimizer refer to it, and
    Python does not collect a cycle through these hooks.

    Args:
        recorder: keeps the judged steps of this optimizer.
        accumulation: knows the gradients since the last step of this optimizer.

    Attributes:
        statistics: the batch statistics of the layers that this optimizer trains, or None without
            such layers. The driver replaces them when the structure of the model changes.
    """

    def __init__(self, recorder: Recorder, accumulation: Accumulation) -> None:
        self.statistics: BatchStatistics | None = None
        # Bound methods of the parts, so that a step makes no second call.
        self.judged = recorder.record
        self.stepped = accumulation.on_step

    def ended(self, skipped: bool | Tensor) -> None:
        """See `StepListener.ended`."""
        if self.statistics is not None:
            self.statistics.on_step_ended(skipped)
