"""What `Healing.report()` says."""

from __future__ import annotations

from dataclasses import dataclass

from healcore.torch.agreeing import Agreement
from healcore.torch.device_seat import DeviceSeat
from healcore.torch.host_seat import HostSeat
from healcore.torch.measuring import Measurer

_FEEDERS = {
    "loss": "observe(loss)",
    "eval_loss": "observe_eval(loss)",
    "update_norm": "observe_update_norm(norm)",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """How one optimizer is healed. `str()` gives it as lines to print."""

    mode: str
    """heal or observe."""
    seat: str
    """Where the engine runs: host (NumPy) or device (torch)."""
    seat_reason: str
    skip: str
    """How a step is held back: found_inf (in the fused kernel), grads (hidden from the step), or
    not run (an optimizer that torch has not written; its `step()` is left out)."""
    clip: str
    """How gradients are scaled: grad_scale (in the fused kernel), or in place."""
    skip_reason: str
    syncs_per_step: int
    """Times per step that the host waits for the device, by healcore's own doing."""
    ranks: int
    """How many decide together; with more than one that is one all_reduce per step."""
    compiled: bool
    """Whether the engine's step runs through torch.compile."""
    waiting_for: tuple[str, ...]
    """Signals the policy reads and has not been given so far; their detectors rest."""

    def __str__(self) -> str:
        lines = [
            f"mode    {self.mode}",
            f"engine  {self.seat}{', compiled' if self.compiled else ''}: {self.seat_reason}",
            f"skip    {'' if self.skip == 'not run' else 'by '}{self.skip}: {self.skip_reason}",
            f"clip    by {self.clip}",
            f"syncs   {self.syncs_per_step} per step",
        ]
        if self.ranks > 1:
            lines.append(f"ranks   {self.ranks} decide together, by one all_reduce per step")
        lines += [f"rests   {name}: call {_FEEDERS[name]}" for name in self.waiting_for]
        return "\n".join(lines)


class Reporter:
    """Remembers why things are as they are."""

    def __init__(
        self,
        measurer: Measurer,
        seat: HostSeat | DeviceSeat,
        seat_reason: str,
        obstacle: str | None,
        leaves_out: bool,
        agreement: Agreement,
    ) -> None:
        self._measurer = measurer
        self._seat = seat
        self._seat_reason = seat_reason
        self._obstacle = obstacle
        self._leaves_out = leaves_out
        self._agreement = agreement

    def __call__(self) -> Report:
        """The report as of now."""
        measurer, seat, engine = self._measurer, self._seat, self._measurer.engine
        on_host = isinstance(seat, HostSeat)
        by_flag = self._obstacle is None and not on_host
        if by_flag:
            reason = "the fused kernel reads it on the device"
        else:
            reason = self._obstacle or "the host knows the decision before the step"
        reads = on_host or (not by_flag and engine.mode != "observe")
        missing = (n for n in _FEEDERS if n in engine.needs and n not in measurer.seen)
        return Report(
            mode=engine.mode,
            seat=seat.name,
            seat_reason=self._seat_reason,
            skip="found_inf" if by_flag else "not run" if self._leaves_out else "grads",
            clip="grad_scale" if self._obstacle is None else "one pass over the gradients",
            skip_reason=reason,
            syncs_per_step=int(reads and measurer.home.type != "cpu"),
            ranks=self._agreement.world,
            compiled=isinstance(seat, DeviceSeat) and seat.compiled,
            waiting_for=tuple(missing),
        )
