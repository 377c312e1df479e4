"""`TorchDriver`: the live state of a torch run, its engines, and the records of its steps.

driver              `TorchDriver`, which the Healer calls
attaching           heals the optimizers of the state
pending_step        one optimizer that is followed, and its steps that were not read yet:
accumulation          the gradients since the last step
layer_buffers         the buffers that a skipped step restores, of two kinds:
batch_statistics        the buffers of torch's norm layers, which every step writes
written_buffers         the floating buffers of other layers
unsaved_buffers     the buffers that `state_dict()` leaves out, for a checkpoint
gradient_window     all optimizers: which have stepped; gradients that are computed again
ddp_gradients       the same with DistributedDataParallel, where all ranks have to repeat
weights             copies, replaces and evaluates the weights
weight_sample       notices other weights in the model, as in an evaluation
structure           notices new, removed and resized parameters
memory              the report after a failure for lack of memory
"""

from __future__ import annotations

from healcore.torch.driver.driver import TorchDriver

__all__ = ["TorchDriver"]
