"""`TorchDriver`: the live state of a torch run, its engines, and the records of its steps.

driver              `TorchDriver`, which the Healer calls
attaching           heals the optimizers of the state
pending_step        hears of each step, and keeps the records that the host has not read yet
optimizer_steps     which optimizers have stepped; their learning rates and other numbers
accumulation        the gradients since the last step
batch_statistics    `running_mean` and other buffers, restored after a skipped step
weights             copies, replaces and evaluates the weights
weight_sample       notices other weights in the model, as in an evaluation
structure           notices new, removed and resized parameters
added_groups        parameter groups that a restart adds
memory              the report after a failure for lack of memory
"""

from __future__ import annotations

from healcore.torch.driver.driver import TorchDriver

__all__ = ["TorchDriver"]
