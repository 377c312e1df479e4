"""What `attach` tells a person, on the logger `healcore`; in a Healer, which tells more, nothing.

On an accelerator nothing waits: flags are gathered on the device, packed every few steps, and read
once the copy has arrived.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from healcore.core.engine import Engine
from healcore.core.step_record import StepRecord
from healcore.core.verdict import Action, Cause, names
from healcore.torch.device_seat import DeviceSeat
from healcore.torch.host_seat import HostSeat
from healcore.torch.step_record import InFlight, OnDevice, OnHost

_log = logging.getLogger("healcore")

EVERY = 10
"""Steps between two looks at an engine on a device."""

WITHOUT_LOSS = 20
"""Steps without any loss after which it is asked whether that is meant."""

WITHOUT_STEP = 100
"""Losses without a step after which that is asked: it may be accumulation."""

_ORDERS = (Action.ROLLBACK, Action.STOP)


class Teller:
    """Writes one line per incident, and one for each thing that a loop has forgotten.

    After ten incidents only the 16th, 32nd, 64th ... have a line.

    Args:
        name: of the optimizer.
        engine: the policy's.
    """

    def __init__(self, name: str, engine: Engine) -> None:
        self._name = name
        self._engine = engine
        self.speaks = True
        """False where another rank tells the same."""
        self.is_polled = False
        """Somebody reads the decisions, and may carry out what they order."""
        self._steps = self._losses = 0
        self._incident = 0
        self._rate = 1.0
        self._told: set[str] = set()
        self._flags: Tensor | None = None
        """int32 (2,): causes and actions since the last look, on the device."""
        self._pending: tuple[OnDevice, InFlight] | None = None

    def observed(self) -> None:
        """A loss was reported."""
        self._losses += 1
        if self._losses == WITHOUT_STEP:
            self._once(
                "no step",
                f"{WITHOUT_STEP} losses were observed since this optimizer's last step: if it was "
                "replaced or copied, attach to the one that steps; if a GradScaler drops its "
                "steps, pass attach(..., scaler=scaler)",
            )

    def judged(self, seat: HostSeat | DeviceSeat, *, has_seen_loss: bool) -> None:
        """A step was judged."""
        self._steps += 1
        self._losses = 0
        if self._steps == WITHOUT_LOSS and not has_seen_loss and "loss" in self._engine.needs:
            self._once(
                "no loss",
                f"no loss has been observed in {WITHOUT_LOSS} steps: call heal.observe(loss) "
                "before each optimizer.step(); detectors that read it rest",
            )
        if isinstance(seat, HostSeat):
            ordered = seat.state.last.decision
            cause, action = int(ordered.cause), int(ordered.action)
            if cause or action or self._rate < 1.0:
                self._tell(OnHost(seat.state).read(), cause, action)
            return
        self._gather(seat)

    def _gather(self, seat: DeviceSeat) -> None:
        ordered = seat.state.last.decision
        if ordered.cause.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # the replays of a CUDA graph run no hooks
        now = torch.stack([ordered.cause, ordered.action])
        self._flags = now if self._flags is None else self._flags | now
        self._read_arrived()
        if self._pending is None and self._steps % EVERY == 0:
            self._pending = OnDevice(seat.state), InFlight(self._flags)
            self._flags = None
            self._read_arrived()

    def _read_arrived(self) -> None:
        if self._pending is None or not self._pending[1].has_arrived():
            return
        (numbers, flags), self._pending = self._pending, None
        cause, action = flags.read().tolist()
        self._tell(numbers.read(), cause, action)

    def _tell(self, now: StepRecord, cause: int, action: int) -> None:
        new, self._incident = now.incident > self._incident, now.incident
        if new and cause and _has_line(now.incident):
            self._write(self._incident_line(now, cause))
        before, self._rate = self._rate, now.lr_scale
        observes = self._engine.mode == "observe"
        if now.lr_scale < before and not observes and _has_line(now.incident):
            self._write(f"step {now.step - 1}: learning rate × {now.lr_scale:g}")
        if observes or self.is_polled:
            return
        for order in _ORDERS:
            if action & order:
                self._once(
                    str(order),
                    f"step {now.step - 1}: the policy orders {names(order)[0]}, and attach() alone "
                    "cannot carry that out: use healcore.Healer, or act on "
                    "heal.last_decision().action",
                )

    def _incident_line(self, now: StepRecord, cause: int) -> str:
        done = ""
        if self._engine.mode == "observe":
            done = "; nothing is changed, the policy observes"
        elif now.onset == now.step - 1:
            done = "; skipped" if now.skip else ""
            if not now.skip and now.grad_scale < 1:
                done = f"; gradients × {now.grad_scale:.3g}"
        return (
            f"step {now.onset}: incident {now.incident}: {', '.join(names(Cause(cause)))}; the "
            f"last finite loss is {now.loss:.4g}, gradient norm {now.grad_norm:.4g}{done}"
        )

    def _once(self, key: str, line: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._write(line)

    def _write(self, line: str) -> None:
        if self.speaks:
            _log.warning("%s: %s", self._name, line)


def _has_line(incident: int) -> bool:
    return incident <= 10 or incident & (incident - 1) == 0
