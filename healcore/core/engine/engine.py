"""The engine: signals in, one decision out. Pure, where-only, the same source in every backend."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from healcore.core.clipping import RULES
from healcore.core.detectors import DETECTORS
from healcore.core.engine import budget, incident, lr, porting, readout, rules, skipping
from healcore.core.engine.config import EngineConfig
from healcore.core.engine.state import EngineState, Tally, init
from healcore.core.signals import Observed, Signals, observe
from healcore.core.tree import map_leaves
from healcore.core.verdict import Action, Cause, Decision, Reading, Telemetry, flag

_NONFINITE = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD)
_ONCE = int(Action.ALERT | Action.SAVE | Action.STOP)


class Engine:
    """A policy at work: `init`, then `step` after `step`.

    Holds no state of its own: `step` is a pure function of (policy, state, signals), so it can be
    jitted, scanned, vmapped, compiled, saved and replayed. All arrays may carry leading batch
    axes; each lane is then a run of its own.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Builds the engine of one policy.

        Args:
            config: the policy; usually from `healcore.policy`.

        Raises:
            ValueError: the mode, the clipping rule or a detector has no such name.
        """
        if config.mode not in ("heal", "observe"):
            raise ValueError(f"mode must be 'heal' or 'observe', got {config.mode!r}")
        if config.clip is not None and config.clip[0] not in RULES:
            raise ValueError(f"clip must be one of {sorted(RULES)}, got {config.clip[0]!r}")
        for name, _ in config.detectors:
            if name not in DETECTORS:
                raise ValueError(f"a detector must be one of {sorted(DETECTORS)}, got {name!r}")
        self.config = config

    # -- what an adapter has to know beforehand -------------------------------------------------

    @property
    def mode(self) -> str:
        """`heal` or `observe`."""
        return self.config.mode

    @cached_property
    def needs(self) -> frozenset[str]:
        """Names of the `Signals` fields this policy reads; a detector without its signal rests."""
        names: set[str] = {"grad_norm"} if self.config.clip else set()
        if self.per_tensor:
            names.add("group_norms")
        for name, _ in self.config.detectors:
            names |= DETECTORS[name].NEEDS
            if name == "nonfinite":
                names |= {"loss", "grad_norm"}
        return frozenset(names)

    @cached_property
    def cuts_lr(self) -> bool:
        """Whether some rule can cut the learning rate."""
        return any(rule.action & int(Action.CUT_LR) for rule in self.config.rules)

    @property
    def per_tensor(self) -> bool:
        """Whether clipping works per tensor and wants `Signals.group_norms`."""
        return self.config.clip is not None and self.config.clip[0] == "adagc"

    # -- the state machine ----------------------------------------------------------------------

    def init(self, *, groups: int = 0, batch: tuple[int, ...] = ()) -> EngineState:
        """The state before the first step, as NumPy arrays.

        Args:
            groups: number of tensors, for per-tensor clipping.
            batch: leading axes, to run many independent engines at once.
        """
        return init(self.config, groups=groups, batch=batch)

    def step(
        self, state: EngineState, signals: Signals, *, xp: Any
    ) -> tuple[EngineState, Decision]:
        """Judges one step.

        Args:
            state: from `init` or the previous step.
            signals: what the step observed; at least a loss or a gradient norm.
            xp: the array namespace of all arrays.

        Returns:
            The new state, and the decision to enforce: neutral in observe mode, whatever was
            ordered (which `state.last.decision` holds).

        Raises:
            ValueError: neither a loss nor a gradient norm is there.
        """
        if xp is np:
            # float32 scalars warn where XLA and torch are silent; the core selects afterwards.
            with np.errstate(all="ignore"):
                return self._step(state, signals, xp=xp)
        return self._step(state, signals, xp=xp)

    def _step(
        self, state: EngineState, signals: Signals, *, xp: Any
    ) -> tuple[EngineState, Decision]:
        if signals.loss is None and signals.grad_norm is None:
            raise ValueError(
                "a step needs a loss or a gradient norm, got neither: pass Signals(loss=...) or "
                "Signals(grad_norm=...)"
            )
        new, ordered = self._judge(state, signals, xp=xp)
        if signals.void is not None:
            void = signals.void
            new = map_leaves(lambda b, a: _pick(void, a, b, xp=xp), new, state)
            ordered = _calm(ordered, state.lr.scale, void, xp=xp)
        if self.mode == "observe":
            return new, _calm(ordered, 1.0, None, xp=xp)
        return new, ordered

    def _judge(
        self, state: EngineState, signals: Signals, *, xp: Any
    ) -> tuple[EngineState, Decision]:
        """One step as ordered. Detectors first, then rules, then clipping, then the ladder."""
        config = self.config
        announced = state.announced
        if signals.announced is not None:
            announced = announced | signals.announced
        spent = xp.where(state.grace > 0, state.grace - 1, 0)
        grace = xp.where(announced, config.grace_steps, spent)
        seen = observe(signals, announced, xp=xp)

        detectors, readings = self._read(state, seen, grace > 0, xp=xp)
        cause, sustained = _causes(readings, seen, xp=xp)

        fired: list[tuple[Any, rules.Firing]] = []
        rule_states = []
        for rule, memory in zip(config.rules, state.rules, strict=True):
            present = sustained if rule.sustained else cause
            hit = (present & rule.causes) != 0
            memory, firing = rules.update(
                rule, memory, hit, state.step, config.incident.quiet_steps, xp=xp
            )
            rule_states.append(memory)
            fired.append((rule, firing))

        never = cause != cause
        wished = _any([f.fired for r, f in fired if r.skip], never)
        skips, skip = skipping.update(config.max_skips, state.skips, wished, seen, xp=xp)

        clip_state, clip = self._clip(state, seen, seen.sound & ~skip, xp=xp)
        trouble = (cause & self._incident_mask) != 0
        incident_state, wanted = incident.update(
            config.incident,
            config.rollback,
            state.incident,
            state.step,
            trouble,
            _any([f.fired for r, f in fired if r.action & Action.ROLLBACK], never),
            _any([f.fired for r, f in fired if r.action & Action.CUT_LR], never),
            xp=xp,
        )
        calm = ~incident_state.open
        purse, granted = budget.update(
            config.budget, state.budget, wanted.recover, wanted.cut, calm, xp=xp
        )
        lr_state = lr.update(config.lr, state.lr, granted.cut, calm, xp=xp)

        action = (
            flag(granted.recover, Action.ROLLBACK, xp=xp)
            | flag(granted.cut, Action.CUT_LR, xp=xp)
            | flag(granted.stop, Action.STOP, xp=xp)
        )
        for rule, firing in fired:
            if rule.action & _ONCE:
                action = action | flag(firing.fresh, rule.action & _ONCE, xp=xp)

        one = lr_state.scale - lr_state.scale + 1.0
        grad_scale, group_scale, clipped = one, None, never
        if clip is not None and self.per_tensor:
            group_scale = xp.where(skip[..., None], 1.0, clip.scale)
            clipped = xp.sum(xp.astype(clip.clipped, xp.int32), axis=-1) > 0
        elif clip is not None:
            grad_scale, clipped = xp.where(skip, one, clip.scale), clip.clipped
        ordered = Decision(
            grad_scale=grad_scale,
            skip=skip,
            lr_scale=lr_state.scale,
            action=action,
            cause=cause,
            rollback_depth=xp.where(granted.recover, wanted.depth, 0),
            group_scale=group_scale,
        )
        clipped = clipped & ~skip
        tally = Tally(
            *(
                xp.where(happened, count + 1, count)
                for count, happened in zip(
                    state.tally,
                    (clipped, skip, cause != 0, granted.recover, granted.cut),
                    strict=True,
                )
            )
        )
        last = self._telemetry(state.last, ordered, seen, clip, readings, xp=xp)
        return EngineState(
            step=state.step + 1,
            announced=never,
            grace=grace,
            clip=clip_state,
            detectors=detectors,
            rules=tuple(rule_states),
            skips=skips,
            incident=incident_state,
            budget=purse,
            lr=lr_state,
            tally=tally,
            last=last,
        ), ordered

    @cached_property
    def _incident_mask(self) -> int:
        """Causes that some rule acts on; the others (an alert on a plateau) open no incident."""
        acts = int(Action.ROLLBACK | Action.CUT_LR | Action.STOP)
        mask = _NONFINITE
        for rule in self.config.rules:
            if rule.skip or rule.action & acts:
                mask |= rule.causes
        return mask

    def _read(
        self, state: EngineState, seen: Observed, in_grace: Any, *, xp: Any
    ) -> tuple[tuple[Any, ...], dict[str, Reading]]:
        """Runs every detector whose signals are there."""
        states, readings = [], {}
        for (name, config), memory in zip(self.config.detectors, state.detectors, strict=True):
            module = DETECTORS[name]
            if all(getattr(seen, field) is not None for field in module.NEEDS):
                memory, reading = module.update(config, memory, seen, xp=xp)
                if name != "nonfinite":
                    reading = Reading(
                        reading.alarm & ~in_grace,
                        reading.sustained & ~in_grace,
                        xp.where(in_grace, 0, reading.cause),
                        reading.z,
                    )
                readings[name] = reading
            states.append(memory)
        return tuple(states), readings

    def _clip(
        self, state: EngineState, seen: Observed, learn: Any, *, xp: Any
    ) -> tuple[Any, Any]:
        """Runs the clipping rule, if there is one and the norm is there."""
        if self.config.clip is None:
            return None, None
        name, config = self.config.clip
        needed = seen.group_norms if self.per_tensor else seen.grad_norm
        if needed is None or seen.grad_norm is None:
            return state.clip, None
        return RULES[name].update(config, state.clip, seen, learn, xp=xp)

    def _telemetry(
        self,
        last: Telemetry,
        ordered: Decision,
        seen: Observed,
        clip: Any,
        readings: Mapping[str, Reading],
        *,
        xp: Any,
    ) -> Telemetry:
        """The step for loggers: the last finite values, so that the state stays finite."""
        loss, norm, threshold, z, z_loss = last[1:]
        if seen.loss is not None:
            loss = xp.where(seen.bad_loss, loss, seen.loss)
        if seen.grad_norm is not None:
            norm = xp.where(seen.bad_grad, norm, seen.grad_norm)
        if clip is not None and not self.per_tensor:
            threshold, z = clip.threshold, clip.z
        if "loss_spike" in readings:
            z_loss = readings["loss_spike"].z
        if ordered.group_scale is None and last.decision.group_scale is not None:
            ordered = ordered._replace(group_scale=last.decision.group_scale)
        return Telemetry(ordered, loss, norm, threshold, z, z_loss)

    # -- what the host says ---------------------------------------------------------------------

    def announce(self, state: EngineState, *, xp: Any) -> EngineState:
        """Opens the grace window at the next step: the LR, the batch or the data changes.

        Baselines begin their warm-up again, and only non-finite values are alarms for
        `grace_steps` steps.
        """
        return state._replace(announced=xp.where(state.step >= 0, True, state.announced))

    def on_rollback(self, live: EngineState, restored: EngineState, *, xp: Any) -> EngineState:
        """The state after going back: detectors of then, budgets and LR multiplier of now.

        Args:
            live: the state at the moment of the rollback.
            restored: the state that the checkpoint holds.
            xp: the array namespace.
        """
        closed = live.incident._replace(
            open=xp.where(live.step >= 0, False, live.incident.open),
            quiet=xp.where(live.step >= 0, 0, live.incident.quiet),
        )
        return restored._replace(
            incident=closed, budget=live.budget, lr=live.lr, tally=live.tally, last=live.last
        )

    # -- reading and carrying -------------------------------------------------------------------

    def metrics(self, state: EngineState) -> dict[str, Any]:
        """Named 0-d arrays for a logger, without a sync; see `readout.metrics`."""
        return readout.metrics(state)

    def to_dict(self, state: EngineState) -> dict[str, Any]:
        """The state in a framework-neutral, JSON-safe form; see `porting.to_dict`."""
        return porting.to_dict(self.config, state)

    def from_dict(self, data: Mapping[str, Any]) -> EngineState:
        """The state from `to_dict`, as NumPy arrays; see `porting.from_dict`."""
        return porting.from_dict(self.config, data)


def _any(flags: list[Any], never: Any) -> Any:
    """Disjunction; `never` (all false) gives type and shape."""
    for each in flags:
        never = never | each
    return never


def _causes(readings: Mapping[str, Reading], seen: Observed, *, xp: Any) -> tuple[Any, Any]:
    """Flags of all alarms, and of the sustained ones, as int32."""
    cause = sustained = xp.astype(seen.sound & False, xp.int32)
    for reading in readings.values():
        cause = cause | reading.cause
        sustained = sustained | xp.where(reading.sustained, reading.cause, 0)
    return cause, sustained


def _pick(condition: Any, a: Any, b: Any, *, xp: Any) -> Any:
    """`where` for a leaf with trailing axes of its own."""
    trailing = (None,) * (b.ndim - condition.ndim)
    return xp.where(condition[(..., *trailing)] if trailing else condition, a, b)


def _calm(decision: Decision, lr_scale: Any, when: Any, *, xp: Any) -> Decision:
    """The neutral decision, where `when` (None: everywhere); causes are still named if None."""
    if when is None:
        when = decision.skip | True
        cause = decision.cause
    else:
        cause = xp.where(when, 0, decision.cause)
    group = decision.group_scale
    return Decision(
        grad_scale=xp.where(when, 1.0, decision.grad_scale),
        skip=decision.skip & ~when,
        lr_scale=xp.where(when, lr_scale, decision.lr_scale),
        action=xp.where(when, 0, decision.action),
        cause=cause,
        rollback_depth=xp.where(when, 0, decision.rollback_depth),
        group_scale=None if group is None else xp.where(when[..., None], 1.0, group),
    )
