"""`TorchDriver`: the live state of a torch run, its engines, and the records of its steps.

driver              `TorchDriver`, which the Healer calls
followed_optimizer  one optimizer: its steps, and the gradients since the last step
buffers             what a forward pass writes into buffers: restored after a skip, and saved
gradient_window     all optimizers: which have stepped; gradients that all ranks compute again
weights             copies and evaluates the weights; notices other weights in the model
structure           notices new, removed and resized parameters
memory              the report after a failure for lack of memory
"""

from __future__ import annotations

from healcore.torch.driver.driver import TorchDriver

__all__ = ["TorchDriver"]
