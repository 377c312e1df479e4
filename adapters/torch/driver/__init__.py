"""`TorchDriver`: the live state of a torch run, its engines, and the records of its steps.

driver              `TorchDriver`, which the Healer calls
attaching           heals the optimizers of the state
pending_step        one optimizer that is followed, and its steps that were not read yet:
accumulation          the gradients since the last step
buffers             what a forward pass writes into buffers: restored after a skip, and saved
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
