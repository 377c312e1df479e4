"""The engine next to the parameters, in torch: no host sync, from the norm to the kernel's flag.

The state lies in tensors whose addresses never change, and is written with `copy_`: a captured
CUDA graph updates it in place, and a rollback restores it in place. Eager, one step of
the preset `default` is some 1,700 launches of a few microseconds each; on an accelerator it is
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
from healcore.torch.measurement import DeviceOrder, Measurement, Order, read
from healcore.torch.porting import grown, restored

# Triton divides approximately and fuses multiply-adds unless told otherwise; the decisions are to
# be those of NumPy and XLA, bit for bit (numerics.py). The core is scalar: exactness costs nothing.
_EXACT = {"eager_numerics.division_rounding": True, "emulate_precision_casts": True}


_foreach_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class DeviceSeat:
    """Runs `engine` on torch tensors.

    Args:
        engine: the policy's engine.
        groups: number of parameters, for per-tensor clipping.
        device: where the first parameter is.
        compile: whether to compile the step; falls back to eager, with a warning, where no
            compiler is at hand.
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
        self._advance = _compiled(self._step) if compile else self._step

    def _placed(self, leaf: Any) -> Tensor:
        return torch.tensor(leaf, device=self.device)

    # -- one step -------------------------------------------------------------------------------

    def advance(self, seen: Measurement) -> DeviceOrder:
        """Judges one step; reads nothing."""
        try:
            order, self.decision = self._advance(seen)
        except Exception as error:
            if not self.compiled:
                raise
            # Tracing and compiling come before the first write: the state is untouched.
            warnings.warn(
                f"healcore's step could not be compiled and runs eagerly, which is slower: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            self.compiled, self._advance = False, self._step
            order, self.decision = self._step(seen)
        return order

    def _step(self, seen: Measurement) -> tuple[DeviceOrder, Decision]:
        """The traced part: signals, engine, state in place, and what the kernel wants to know."""
        norm, groups, held = seen.grad_norm, seen.group_norms, None
        assert norm is not None
        if seen.grad_divisor is not None:
            norm = norm / seen.grad_divisor
            groups = None if groups is None else groups / seen.grad_divisor
        if seen.found_inf is not None:
            held = seen.found_inf > 0
        void = seen.void
        if seen.rehearsal:
            void = norm == 0 if void is None else void | (norm == 0)
        signals = Signals(
            loss=seen.loss,
            grad_norm=norm,
            group_norms=groups,
            eval_loss=seen.eval_loss,
            update_norm=seen.update_norm,
            void=void,
            learning_rate=seen.learning_rate,
        )
        new, decision = self.engine.step(self.state, signals, xp=self._xp)
        _write(self.state, new)
        skip = decision.skip if held is None else decision.skip | held
        base = seen.grad_divisor
        if base is None:
            base = torch.ones_like(decision.grad_scale)
        return DeviceOrder(
            found_inf=skip.to(torch.float32),
            grad_divisor=base / decision.grad_scale,
            lr_scale=decision.lr_scale,
            grad_scale=decision.grad_scale,
            group_scale=decision.group_scale,
        ), decision

    def order(self, seen: Measurement) -> Order:
        """Judges one step and reads the answer, in one copy."""
        return read_order(self.advance(seen))

    # -- beside the step ------------------------------------------------------------------------

    def expect_change(self) -> None:
        """Opens the grace window at the next step."""
        _write(self.state, self.engine.expect_change(self.state, xp=self._xp))

    def decline(self) -> None:
        """Gives back the rollback that was ordered last."""
        _write(self.state, self.engine.decline(self.state, xp=self._xp))

    def grow(self, groups: int) -> None:
        """Begins a history for parameters that were added after the others.

        Leaves that do not grow stay the tensors they are.
        """
        self.groups = groups
        fresh = map_leaves(self._placed, self.engine.init(groups=groups))
        self.state = map_leaves(grown, self.state, fresh)

    def metrics(self) -> dict[str, Tensor]:
        """Named 0-d tensors on the device; copies, since the state is written in place."""
        found = self.engine.metrics(self.state)
        return {name: value.detach().clone() for name, value in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """The framework-neutral state. A sync."""
        return self.engine.to_dict(map_leaves(lambda leaf: leaf.cpu().numpy(), self.state))

    def load(self, data: Mapping[str, Any], *, rollback: bool) -> None:
        """Takes over a saved state in place; with `rollback`, budgets and LR multiplier stay."""
        saved = map_leaves(self._placed, restored(self.engine, data, self.groups))
        if rollback:
            saved = self.engine.on_rollback(self.state, saved, xp=self._xp)
        _write(self.state, saved)
        self.decision = None


def read_order(order: DeviceOrder) -> Order:
    """A device order as Python numbers: one sync on an accelerator, none on a CPU."""
    held, scale, lr_scale, groups = read(
        [order.found_inf, order.grad_scale, order.lr_scale, order.group_scale]
    )
    assert held is not None
    assert scale is not None
    assert lr_scale is not None
    return Order(bool(held > 0), float(scale), float(lr_scale), groups)


def _write(old: EngineState, new: EngineState) -> None:
    """Copies every leaf of `new` over that of `old`, in place.

    A leaf that is passed on unchanged is skipped. One that has moved to another place in the tree
    is cloned first: it may be overwritten before it is read.
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
    """`step` compiled whole, with exact arithmetic where this torch knows the switches."""
    from torch._inductor import list_options

    known = set(list_options())
    options: dict[str, Any] = {name: value for name, value in _EXACT.items() if name in known}
    return torch.compile(step, fullgraph=True, dynamic=False, options=dict(options))
