"""The policy's engine with the state of one run: in NumPy on the host, or in torch on a device.

`HostEngine` is for CPUs, and for steps whose decision the host needs anyway (one sync per step on
an accelerator). Its step is recorded once (`healcore.core.tape`) and takes 0.1 ms.

`DeviceEngine` needs no sync. Which of two ways it takes follows from the policy:

- Most of `default` and `observe` can wait: only a test for NaN and Inf stands in the step
  (`Engine.tests_only_finite`). The host judges the step from a copy of its signals when the copy
  has arrived, with the same function in NumPy (`LateJudge`).
- A policy that clips by statistics, skips spikes, or cuts the learning rate decides in the step. An
  eager step makes over 100 launches of a few microseconds each, so it is compiled into a few
  kernels.
"""

from __future__ import annotations

from typing import TypeAlias

from healcore.torch.engines.async_copy import AsyncCopy, keep_after_cuda_error
from healcore.torch.engines.device import DeviceEngine
from healcore.torch.engines.host import HostEngine
from healcore.torch.engines.late_judge import RECORD_LAG
from healcore.torch.engines.stateful import EnforcedDecision, PendingRecord, is_cut, to_host
from healcore.torch.engines.unread_records import UnreadRecords

LiveEngine: TypeAlias = HostEngine | DeviceEngine
"""The engine of one optimizer, with its state."""

__all__ = [
    "RECORD_LAG",
    "AsyncCopy",
    "DeviceEngine",
    "EnforcedDecision",
    "HostEngine",
    "LiveEngine",
    "PendingRecord",
    "UnreadRecords",
    "is_cut",
    "keep_after_cuda_error",
    "to_host",
]
