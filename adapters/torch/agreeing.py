"""The ranks of a data-parallel run judge the same signals: one all_reduce per step.

DistributedDataParallel reduces gradients and leaves the loss local: a loss spike on one rank would
make that rank skip, the others would step, and from then on each trains a model of its own. So the
signals of a step (loss, norms, a GradScaler's flag) go through one `all_reduce` before they are
judged, and every rank's engine is given the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from healcore.core.verdict import Decision
from healcore.torch.errors import AttachError, RanksDisagreeError
from healcore.torch.measurement import Measurement
from healcore.torch.step_record import InFlight

_SIGNALS = ("loss", "grad_norm", "update_norm", "eval_loss", "found_inf")
_ASKED = frozenset({"loss", "grad_norm", "update_norm"})
"""Signals that one rank may have and another not."""


class Agreement:
    """Gives every rank of a process group the mean of what the ranks have measured.

    Sums and quotients are in float64: what was the same on all ranks, as the norm of reduced
    gradients is, comes back as the same float32 to the bit.

    Args:
        group: a process group; "auto": the default one, once it is initialized with several ranks;
            None: nothing is exchanged.
        home: the device of the signals.

    Raises:
        AttachError: `group` is something else.
    """

    def __init__(self, group: Any, home: torch.device) -> None:
        self._auto = isinstance(group, str) and group == "auto" and dist.is_available()
        is_group = dist.is_available() and isinstance(group, dist.ProcessGroup)
        if not (is_group or group is None or (isinstance(group, str) and group == "auto")):
            raise AttachError(
                "process_group is a torch.distributed process group, 'auto' or None, got "
                f"{type(group).__name__}: leave it out for the default group, or pass None where "
                "every rank is given the same loss and the same gradients anyway"
            )
        self._group: Any = group if is_group else None
        self._home = home
        self._zero = torch.zeros((), dtype=torch.float32, device=home)
        self._one = torch.ones((), dtype=torch.float32, device=home)
        self._differs: InFlight | None = None

    @property
    def world(self) -> int:
        """How many ranks decide together; 1: this one alone."""
        if self._auto and dist.is_initialized():
            self._group, self._auto = dist.group.WORLD, False
        return 1 if self._group is None else dist.get_world_size(self._group)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for those that decide together."""
        return self.world == 1 or dist.get_rank(self._group) == 0

    def agree(self, seen: Measurement, last: Decision | None) -> Measurement:
        """The means over those ranks that have a value. Every rank calls it at every step.

        Nothing is read on the host, unless this rank lacks a loss or a norm that another may have.

        Args:
            seen: what this rank has measured; `grad_norm` is None without gradients.
            last: what this rank has decided at the step before.

        Returns:
            The same on every rank; `grad_norm` is None if no rank has gradients.

        Raises:
            RanksDisagreeError: the decisions at the step before were not the same. On an
                accelerator this is noticed some steps later, when it can be read without waiting.
        """
        if self._differs is not None and self._differs.has_arrived():
            differs, self._differs = self._differs, None
            _raise_if(differs)
        values, counts = [], []
        for name in _SIGNALS:
            value = getattr(seen, name)
            there = self._zero if value is None else self._one
            if value is None:
                value = self._zero
            elif name == "eval_loss":  # NaN stands for "none at this step"
                there = (~torch.isnan(value)).to(torch.float32)
                value = torch.where(torch.isnan(value), self._zero, value)
            values.append(value)
            counts.append(there)
        mark = self._mark(last)
        packed = torch.stack([*values, mark, *counts, self._one])
        if seen.group_norms is not None:
            packed = torch.cat([packed, seen.group_norms])
        n = len(values) + 1
        sums, ranks, groups = self._summed(packed).tensor_split((n, 2 * n))
        means = (sums / ranks).to(torch.float32).unbind()
        differs = InFlight(means[-1] != mark)
        if self._home.type == "cpu":
            _raise_if(differs)
        elif self._differs is None:
            self._differs = differs
        nowhere = {name for name in _SIGNALS if getattr(seen, name) is None}
        if nowhere & _ASKED:
            there = ranks.cpu().numpy()
            nowhere -= {name for i, name in enumerate(_SIGNALS) if name in _ASKED and there[i]}
        found = {
            name: mean for name, mean in zip(_SIGNALS, means, strict=False) if name not in nowhere
        }
        if seen.group_norms is not None:
            found["group_norms"] = (groups / self.world).to(torch.float32)
        return seen._replace(**found)

    def _summed(self, packed: Tensor) -> Tensor:
        """The sum over the ranks, float64."""
        wire = _wire(self._group, self._home)
        packed = packed.to(wire, torch.float64)
        dist.all_reduce(packed, group=self._group)
        return packed.to(self._home, non_blocking=True)

    def _mark(self, last: Decision | None) -> Tensor:
        """One number that differs where decisions differ, float32: its mean is exact."""
        if last is None:
            return self._zero
        if not isinstance(last.grad_scale, Tensor):
            told = 8.0 * last.skip + 2.0 * last.lr_scale + last.grad_scale
            return torch.full_like(self._zero, float(told))
        return 8.0 * last.skip.to(torch.float32) + 2.0 * last.lr_scale + last.grad_scale


def _raise_if(differs: InFlight) -> None:
    if differs.read():
        raise RanksDisagreeError(
            "the ranks decided different things at the step before, so that their parameters "
            "differ: attach with one policy, and call expect_change(), load_state_dict() and "
            "on_rollback() on every rank before the same step; go back to a checkpoint"
        )


def _wire(group: Any, home: torch.device) -> torch.device:
    """Where the group can reduce: the signals' own device if it can."""
    kinds = [device.type for device in group._device_types]
    if home.type in kinds or not kinds:
        return home
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
