"""`DeviceEngine`: the engine in torch, next to the parameters, without a host sync.

The state is held in tensors whose addresses never change, and written with `copy_`: a captured
CUDA graph updates it in place, and a rollback restores it in place. Run eagerly, one step of the
preset `default` is some 1,700 launches of a few microseconds each; on an accelerator it is
therefore compiled into a few kernels (``torch.compile(fullgraph=True)``).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from healcore.core.engine import Engine, EngineState
from healcore.core.signals import Signals
from healcore.core.tree import leaves, map_leaves
from healcore.core.verdict import Decision
from healcore.torch import namespace
from healcore.torch.engine_state import extended, from_saved
from healcore.torch.host_engine import HostEngine
from healcore.torch.measurement import DeviceOrder, HostOrder, Measurement, read

# By default Triton divides approximately and fuses multiply-adds. The decisions must equal those of
# NumPy and XLA bit for bit (numerics.py). The core is scalar: exactness costs nothing.
_EXACT = {"eager_numerics.division_rounding": True, "emulate_precision_casts": True}


_foreach_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class DeviceEngine:
    """An engine and its state, in torch tensors.

    Args:
        engine: the policy's engine.
        groups: number of parameters, for per-tensor clipping.
        device: where the first parameter is.
        compile: whether to compile the step; falls back to eager, with a warning, where there is
            no compiler.
    """

    name = "device"

    def __init__(self, engine: Engine, groups: int, device: torch.device, *, compile: bool) -> None:
        self.engine = engine
        self.groups = groups
        self.device = device
        self.compiled = compile
        self.decision: Decision | None = None
        self._xp = namespace.on(device)
        self.state: EngineState = map_leaves(self._placed, engine.init(groups=groups))
        self._run = _compiled(self._step) if compile else self._step

    def _placed(self, leaf: Any) -> Tensor:
        return torch.tensor(leaf, device=self.device)

    # -- one step -------------------------------------------------------------------------------

    def step(self, measured: Measurement) -> DeviceOrder:
        """Judges one step without reading anything on the host."""
        try:
            order, self.decision = self._run(measured)
        except Exception as error:
            if not self.compiled:
                raise
            # Tracing and compiling come before the first write: the state is untouched.
            warnings.warn(
                f"healcore's step could not be compiled and runs eagerly, which is slower: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            self.compiled, self._run = False, self._step
            order, self.decision = self._step(measured)
        return order

    def _step(self, measured: Measurement) -> tuple[DeviceOrder, Decision]:
        """The compiled part: signals, engine, state written in place, arguments of the kernel."""
        norm, groups, overflowed = measured.grad_norm, measured.group_norms, None
        assert norm is not None
        if measured.grad_divisor is not None:
            norm = norm / measured.grad_divisor
            groups = None if groups is None else groups / measured.grad_divisor
        if measured.found_inf is not None:
            overflowed = measured.found_inf > 0
        skipped = measured.externally_skipped
        if measured.state_init:
            skipped = norm == 0 if skipped is None else skipped | (norm == 0)
        signals = Signals(
            loss=measured.loss,
            grad_norm=norm,
            group_norms=groups,
            eval_loss=measured.eval_loss,
            update_norm=measured.update_norm,
            externally_skipped=skipped,
            learning_rate=measured.learning_rate,
        )
        new, decision = self.engine.step(self.state, signals, xp=self._xp)
        _write(self.state, new)
        skip = decision.skip if overflowed is None else decision.skip | overflowed
        base = measured.grad_divisor
        if base is None:
            base = torch.ones_like(decision.grad_scale)
        return DeviceOrder(
            found_inf=skip.to(torch.float32),
            grad_divisor=base / decision.grad_scale,
            lr_scale=decision.lr_scale,
            grad_scale=decision.grad_scale,
            group_scale=decision.group_scale,
        ), decision

    # -- between steps --------------------------------------------------------------------------

    def expect_change(self) -> None:
        """Opens the grace window at the next step."""
        _write(self.state, self.engine.expect_change(self.state, xp=self._xp))

    def decline(self) -> None:
        """Cancels the rollback that was ordered last: it is not charged to the budget."""
        _write(self.state, self.engine.decline(self.state, xp=self._xp))

    def grow(self, groups: int) -> None:
        """Begins a history for parameters that were added to the optimizer.

        Leaves whose size does not depend on the parameters stay the same tensors.
        """
        self.groups = groups
        fresh = map_leaves(self._placed, self.engine.init(groups=groups))
        self.state = map_leaves(extended, self.state, fresh)

    def metrics(self) -> dict[str, Tensor]:
        """Named 0-d tensors on the device; copies, since the state is written in place."""
        found = self.engine.metrics(self.state)
        return {name: value.detach().clone() for name, value in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """The framework-neutral state. A sync."""
        return self.engine.to_dict(map_leaves(lambda leaf: leaf.cpu().numpy(), self.state))

    def load(self, data: Mapping[str, Any], *, rollback: bool) -> None:
        """Loads a saved state in place; with `rollback`, budgets and LR multiplier stay."""
        saved = map_leaves(self._placed, from_saved(self.engine, data, self.groups))
        if rollback:
            saved = self.engine.on_rollback(self.state, saved, xp=self._xp)
        _write(self.state, saved)
        self.decision = None


LiveEngine = HostEngine | DeviceEngine
"""An engine with the state of one run."""


def read_order(order: DeviceOrder) -> HostOrder:
    """A device order as Python numbers: one sync on an accelerator, none on a CPU."""
    found_inf, scale, lr_scale, groups = read(
        [order.found_inf, order.grad_scale, order.lr_scale, order.group_scale]
    )
    assert found_inf is not None
    assert scale is not None
    assert lr_scale is not None
    return HostOrder(bool(found_inf > 0), float(scale), float(lr_scale), groups)


def _write(old: EngineState, new: EngineState) -> None:
    """Copies every leaf of `new` over that of `old`, in place.

    An unchanged leaf is left alone. A leaf that has moved to another position in the tree is cloned
    first: it might be overwritten before it is read.
    """
    before, after = leaves(old), leaves(new)
    compiling = torch.compiler.is_compiling()
    if compiling:  # at trace time only, and Dynamo knows `is`, not id()
        moved = [any(n is o for o in before) for n in after]
    else:
        known = {id(o) for o in before}
        moved = [id(n) in known for n in after]
    ready = [
        n.clone() if m and n is not o else n for o, n, m in zip(before, after, moved, strict=True)
    ]
    changed = [(o, n) for o, n in zip(before, ready, strict=True) if n is not o]
    if compiling:  # into the kernels that compute them
        for o, n in changed:
            o.copy_(n)
        return
    for dtype in {o.dtype for o, _ in changed}:  # one launch for each, not for every leaf
        pairs = [(o, n) for o, n in changed if o.dtype is dtype]
        _foreach_copy_([o for o, _ in pairs], [n for _, n in pairs])


def _compiled(step: Any) -> Any:
    """`step` compiled as one graph, with exact arithmetic where this torch has the options."""
    from torch._inductor import list_options

    known = set(list_options())
    options: dict[str, Any] = {name: value for name, value in _EXACT.items() if name in known}
    return torch.compile(step, fullgraph=True, dynamic=False, options=dict(options))
