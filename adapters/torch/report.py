"""`Report`: what `Healing.report()` returns."""

from __future__ import annotations

from dataclasses import dataclass

from healcore.torch.device_engine import DeviceEngine, LiveEngine
from healcore.torch.host_engine import HostEngine
from healcore.torch.measurer import Measurer
from healcore.torch.signal_allreduce import SignalAllReduce

_METHODS = {
    "loss": "observe(loss)",
    "eval_loss": "observe_eval(loss)",
    "update_norm": "observe_update_norm(norm)",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """How one optimizer is healed. `str()` gives it as lines to print."""

    mode: str
    """heal or observe."""
    engine: str
    """Where the engine runs: host (NumPy) or device (torch)."""
    engine_reason: str
    skip: str
    """How a step is skipped: found_inf (in the fused kernel), grads (hidden from the step), or
    not run (the `step()` of a third-party optimizer)."""
    clip: str
    """How gradients are scaled: grad_scale (in the fused kernel), or in place."""
    skip_reason: str
    syncs_per_step: int
    """Times per step that the host waits for the device because of healcore."""
    ranks: int
    """Number of ranks that decide together; several need one all_reduce per step."""
    compiled: bool
    """Whether the engine's step runs through torch.compile."""
    waiting_for: tuple[str, ...]
    """Signals that the policy reads and no step had so far; their detectors are inactive."""

    def __str__(self) -> str:
        lines = [
            f"mode    {self.mode}",
            f"engine  {self.engine}{', compiled' if self.compiled else ''}: {self.engine_reason}",
            f"skip    {'' if self.skip == 'not run' else 'by '}{self.skip}: {self.skip_reason}",
            f"clip    by {self.clip}",
            f"syncs   {self.syncs_per_step} per step",
        ]
        if self.ranks > 1:
            lines.append(f"ranks   {self.ranks} decide together, by one all_reduce per step")
        lines += [f"missing {name}: call {_METHODS[name]}" for name in self.waiting_for]
        return "\n".join(lines)


class Reporter:
    """Makes the report of one `Healing`."""

    def __init__(
        self,
        measurer: Measurer,
        live_engine: LiveEngine,
        engine_reason: str,
        obstacle: str | None,
        omits_step: bool,
        all_reduce: SignalAllReduce,
    ) -> None:
        self._measurer = measurer
        self._live_engine = live_engine
        self._engine_reason = engine_reason
        self._obstacle = obstacle
        self._leaves_out = omits_step
        self._all_reduce = all_reduce

    def __call__(self) -> Report:
        """The current report."""
        measurer, live_engine, engine = self._measurer, self._live_engine, self._measurer.engine
        on_host = isinstance(live_engine, HostEngine)
        by_flag = self._obstacle is None and not on_host
        if by_flag:
            reason = "the fused kernel reads it on the device"
        else:
            reason = self._obstacle or "the host knows the decision before the step"
        reads = on_host or (not by_flag and engine.mode != "observe")
        missing = (n for n in _METHODS if n in engine.needs and n not in measurer.seen)
        return Report(
            mode=engine.mode,
            engine=live_engine.name,
            engine_reason=self._engine_reason,
            skip="found_inf" if by_flag else "not run" if self._leaves_out else "grads",
            clip="grad_scale" if self._obstacle is None else "one pass over the gradients",
            skip_reason=reason,
            syncs_per_step=int(reads and measurer.home.type != "cpu"),
            ranks=self._all_reduce.world,
            compiled=isinstance(live_engine, DeviceEngine) and live_engine.compiled,
            waiting_for=tuple(missing),
        )
