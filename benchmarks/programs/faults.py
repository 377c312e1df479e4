"""Runs a program with a fault in it: python -m benchmarks.programs.faults RESULT FAULT SCRIPT ARGS.

FAULT is "none", "nan:60" (the gradients of backward pass 60 are NaN), "rate:60:20" (the learning
rates are 30 times as high for 20 backward passes) or "kill:60" (kills the process). At the end
RESULT gets the digest of the parameters of all optimizers. Programs in JAX have the environment
variable WEIGHTS, the name of their parameters; their edits call `jax_faults`.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

WARMUP = 20
"""Backward passes of a process before its CPU time is counted."""
RATE = 30.0
"""Factor of a learning rate that is too high."""
_VISION = """nms qnms roi_align _roi_align_backward roi_pool _roi_pool_backward ps_roi_align
_ps_roi_align_backward ps_roi_pool _ps_roi_pool_backward deform_conv2d _deform_conv2d_backward
qroi_align"""
"""Operators of torchvision, whose wheel for CUDA cannot register them in torch for CPUs."""


class Fault:
    """What to disturb, and the number of backward passes of this process."""

    def __init__(self, fault: str) -> None:
        self.kind, *numbers = fault.split(":")
        self.first, self.length = [*map(int, numbers), 1, 1][:2]
        self.passes = 0
        self.began = 0.0
        """CPU time of this process when its first passes were over."""

    def count(self) -> int:
        """Counts a pass, and kills the process if this is its fault."""
        self.passes += 1
        if self.passes == WARMUP + 1:
            self.began = time.process_time()
        if self.kind == "kill" and self.passes == self.first:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.passes


def _made_by_healcore() -> bool:
    """Whether healcore constructs the optimizer: it tries a small one to learn its moments."""
    frame = sys._getframe(2)
    while frame.f_globals["__name__"].startswith("torch."):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_globals["__name__"].startswith(("healcore.", "adapters."))


class Faults(Fault):
    """Disturbs backward passes and learning rates of a program in torch."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.optimizers: list[Any] = []
        self.raised: dict[int, float] = {}
        """Id of a parameter group -> the rate that this object has set."""

    def install(self) -> None:
        """Replaces the backward pass and the constructor of optimizers."""
        import torch

        backward, created = torch.Tensor.backward, torch.optim.Optimizer.__init__

        def counted_backward(loss: Any, *args: Any, **kwargs: Any) -> None:
            self.count()
            self._set_rates()
            backward(loss, *args, **kwargs)
            if self.kind == "nan" and self.passes == self.first:
                for each in self.parameters():
                    if each.grad is not None:
                        each.grad.fill_(float("nan"))

        def remembered(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            created(optimizer, *args, **kwargs)
            if not _made_by_healcore():
                self.optimizers.append(optimizer)

        torch.Tensor.backward = counted_backward  # type: ignore[method-assign]
        torch.optim.Optimizer.__init__ = remembered  # type: ignore[method-assign]
        if torch.version.cuda is None:
            self._library = torch.library.Library("torchvision", "DEF")  # its operators end with it
            for name in _VISION.split():
                self._library.define(f"{name}(Tensor x) -> Tensor")

    def parameters(self) -> list[Any]:
        """The parameters of all optimizers."""
        groups = (group for each in self.optimizers for group in each.param_groups)
        return [parameter for group in groups for parameter in group["params"]]

    def _set_rates(self) -> None:
        within = self.first <= self.passes < self.first + self.length
        for optimizer in self.optimizers if self.kind == "rate" else ():
            for group in optimizer.param_groups:
                ours = self.raised.get(id(group)) == group["lr"]
                if within and not ours:  # also after a scheduler has set its own
                    group["lr"] = self.raised[id(group)] = group["lr"] * RATE
                elif not within and ours:
                    group["lr"] = self.raised.pop(id(group)) / RATE

    def digest(self) -> str:
        """Digest of all parameters."""
        found = hashlib.sha256()
        for each in self.parameters():
            found.update(each.detach().float().cpu().numpy().tobytes())
        return found.hexdigest()[:16]


def main(result: str, fault: str, script: str, *args: str) -> None:
    os.environ["FAULT"] = fault
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).parent))
    if weights := os.environ.get("WEIGHTS"):
        names = runpy.run_path(script, run_name="__main__")
        in_jax: Any = sys.modules["benchmarks.programs.jax_faults"]  # the program imports it
        seconds = time.process_time() - in_jax.fault.began
        passes, digest = in_jax.fault.passes, in_jax.digest(names[weights])
    else:
        faults = Faults(fault)
        faults.install()
        runpy.run_path(script, run_name="__main__")
        seconds = time.process_time() - faults.began
        passes, digest = faults.passes, faults.digest()
    found = {"passes": passes, "digest": digest, "seconds": round(seconds, 3)}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
