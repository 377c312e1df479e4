"""`Engine`: a pure function from signals to one decision, the same source for every backend."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from healcore.core import numerics
from healcore.core.array_namespace import NUMPY, Array, ArrayNamespace, Flag, Float, as_namespace
from healcore.core.clipping import RULES
from healcore.core.decision import NONFINITE, Action, Cause, Decision
from healcore.core.detectors import DETECTORS, FROM_EVALUATIONS
from healcore.core.engine import learning_rate
from healcore.core.engine.config import EngineConfig, may_limit_rate
from healcore.core.engine.incidents import RecoveryOrders
from healcore.core.engine.judge import judge
from healcore.core.engine.saved_state import (
    SCHEMA,
    StateError,
    from_json_data,
    to_json_data,
    with_unknown_rate,
)
from healcore.core.engine.state import FROZEN, UNKNOWN_RATE, EngineState, init, record_numbers
from healcore.core.signals import Signals
from healcore.core.step_record import RECORD_FIELDS, record_metrics
from healcore.core.trees import map_leaves, select

_MAX_GROUPS = 10_000_000


class Engine:
    """The state machine of one policy: `init`, then one `step` per training step.

    The engine holds no state. `step` is a pure function of (policy, state, signals). It can be
    jitted, scanned, vmapped, compiled and replayed. Arrays may have leading batch axes, and each
    lane is then an independent run.

    These attributes say what a run with the policy needs. They are fixed when the engine is made:

        attribute            True if                                        read by
        per_tensor           clipping is per tensor: `Signals.group_norms`  all packages
        clips_at_fixed_norm  the clipping rule is one fixed limit           adapters
        scales_grads         a step may clip, or limit the gradient norm    adapters
        limits_norm          `step` applies `EngineState.norm_limit`        adapters
        cuts_lr              a rule can cut the learning rate               this class only
        limits_lr            the rate may get a limit (`limit_lr`)          adapters, runtime
        scales_lr            `Decision.lr_scale` can differ from 1          adapters, runtime
        resets_moments       a cut of the rate resets the moments           adapters
        skips_bad_loss       a loss that is not finite skips the step       torch adapter
        tests_only_finite    a step can be judged after it was taken        torch adapter
    """

    def __init__(self, config: EngineConfig, *, limits_norm: bool = True) -> None:
        """Builds the engine of one policy, which is usually from `healcore.policy`.

        Args:
            config: the policy.
            limits_norm: whether `step` applies a limit that `limit_norm` has set. False for states
                that never get one: replays, and the engines of `specialised_for`.

        Raises:
            ValueError: unknown mode, clipping rule or detector.
        """
        if config.mode not in ("heal", "observe"):
            raise ValueError(f"mode must be 'heal' or 'observe', got {config.mode!r}")
        if config.clip is not None and getattr(config.clip, "kind", None) not in RULES:
            raise ValueError(
                f"clip must be a rule of one of the kinds {sorted(RULES)}, got {config.clip!r}"
            )
        for name, _ in config.detectors:
            if name not in DETECTORS:
                raise ValueError(f"a detector must be one of {sorted(DETECTORS)}, got {name!r}")
        self.config, self.mode = config, config.mode
        self._clip_name: str | None = None
        self.per_tensor = self.clips_at_fixed_norm = False
        if config.clip is not None:
            self._clip_name = config.clip.kind
            self.per_tensor = config.clip.per_tensor
            self.clips_at_fixed_norm = config.clip.is_fixed
        self.limits_norm = limits_norm
        # Attributes, because Dynamo cannot trace the lock of Python 3.11's `cached_property`.
        self.cuts_lr = any(rule.action & Action.CUT_LR for rule in config.rules)
        self.limits_lr = may_limit_rate(config.lr)
        """A limit of the rate needs `Signals.learning_rate`."""
        self.scales_lr = self.cuts_lr or self.limits_lr
        self.tests_only_finite = self._tests_only_finite()
        """Whether each decision to enforce follows from the step alone: from a test for NaN and
        Inf, and from a fixed clip. Such a step can be judged after it was taken, because the state
        changes nothing in it. In observe mode no decision is enforced. False for a policy that
        clips per tensor, whose judge reads a norm of each tensor.
        """
        self.skips_bad_loss = any(
            rule.skip and rule.causes & Cause.NONFINITE_LOSS for rule in config.rules
        )
        """A gradient that is not finite always skips the step."""
        self.resets_moments = config.lr.reset_moments and self.cuts_lr and self.mode != "observe"
        """False in observe mode, which enforces nothing."""
        self.scales_grads = config.clip is not None or limits_norm
        """If False, `Decision.grad_scale` and `group_scale` are always 1."""
        self._specialised: dict[tuple[bool, bool], Engine] = {}
        """Engines of `specialised_for`, by whether they limit the rate, and the gradient norm."""

    def _tests_only_finite(self) -> bool:
        if self.per_tensor:
            return False
        if self.mode == "observe":
            return True
        for rule in self.config.rules:
            is_immediate = type(rule.consecutive) is int and rule.consecutive == 1
            if rule.skip and (
                rule.causes & ~int(NONFINITE) or rule.sustained or rule.within or not is_immediate
            ):
                return False
        clips_by_state = self.config.clip is not None and not self.clips_at_fixed_norm
        return not (clips_by_state or self.scales_lr or self.limits_norm)

    @cached_property
    def fingerprint(self) -> str | None:
        """Sixteen hex digits, equal for equal numbers within one release of healcore.

        Saved states and reports name the policy by it, whatever its file is called. None if the
        numbers are arrays, as for many policies at once.
        """
        numbers: tuple[Any, ...] = self.config
        if self.config.clip is not None:
            numbers = self.config._replace(clip=(self.config.clip.kind, self.config.clip))
        try:
            text = json.dumps(numbers, sort_keys=True)
        except TypeError:
            return None
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def needs(self) -> frozenset[str]:
        """The `Signals` fields that the policy reads; a detector is inactive without its signal."""
        names: set[str] = set()
        if self.config.clip is not None:
            names.add("grad_norm")
        if self.per_tensor:
            names.add("group_norms")
        for _, detector in self.config.detectors:
            names |= detector.NEEDS
            if detector.CAUSE & NONFINITE:  # needs neither, and judges each of them
                names |= {"loss", "grad_norm"}
        return frozenset(names)

    def init(self, *, groups: int = 0, batch: tuple[int, ...] = ()) -> EngineState:
        """The state before the first step, as NumPy arrays.

        Args:
            groups: number of tensors, for per-tensor clipping.
            batch: leading axes, to run many independent engines at once.
        """
        return init(self.config, groups=groups, batch=batch)

    def step(
        self, state: EngineState, signals: Signals, *, xp: ArrayNamespace | ModuleType
    ) -> tuple[EngineState, Decision]:
        """Judges one step.

        Args:
            state: from `init` or the previous step.
            signals: at least a loss or a gradient norm.
            xp: the array namespace of all arrays: an `ArrayNamespace`, or a module with NumPy's
                functions, such as `numpy` itself.

        Returns:
            The new state, and the decision to enforce. In observe mode the decision is neutral, and
            `state.last.decision` holds the ordered decision.

        Raises:
            ValueError: the signals have neither a loss nor a gradient norm.

        Examples:
            >>> import numpy as np
            >>> from healcore.core.signals import Signals
            >>> from healcore.policy import engine_of
            >>> engine = engine_of("default")
            >>> signals = Signals(loss=np.float32(2.0), grad_norm=np.float32("nan"))
            >>> state, decision = engine.step(engine.init(), signals, xp=np)
            >>> bool(decision.skip)
            True
        """
        if signals.loss is None and signals.grad_norm is None:
            raise ValueError(
                "a step needs a loss or a gradient norm, got neither: pass Signals(loss=...) or "
                "Signals(grad_norm=...)"
            )
        xp = as_namespace(xp)
        # NumPy warns of invalid values that `where` discards later.
        with np.errstate(all="ignore") if xp is NUMPY else nullcontext():
            new, decision = judge(self.config, state, signals, limits_norm=self.limits_norm, xp=xp)
            observes = self.mode == "observe"
            if observes and any(rule.action & Action.ROLLBACK for rule in self.config.rules):
                new = self.subtract_rollback(new, xp=xp)
            if signals.externally_skipped is not None:
                skipped = signals.externally_skipped
                new = self._without_step(state, new, signals, skipped, xp=xp)
                decision = _neutral(decision, skipped, state.lr.scale, xp=xp)
                decision = decision._replace(cause=xp.where(skipped, 0, decision.cause))
            if observes:
                decision = _neutral(decision, numerics.true_like(decision.skip), 1.0, xp=xp)
        return new, decision

    def _without_step(
        self,
        old: EngineState,
        new: EngineState,
        signals: Signals,
        skipped: Flag,
        *,
        xp: ArrayNamespace,
    ) -> EngineState:
        """The old state if the caller skips the step, with the signals that come only once.

        The loss and the norms of a skipped step are dropped, because the next step has its own. An
        announced change and an evaluation are reported for one step only, so they would be lost.
        """
        kept = map_leaves(lambda after, before: select(skipped, before, after, xp=xp), new, old)
        expected = old.change_expected
        if signals.change_expected is not None:
            expected = expected | signals.change_expected
        detectors = []
        for (name, _), before, after in zip(
            self.config.detectors, kept.detectors, new.detectors, strict=True
        ):
            for field in FROM_EVALUATIONS.get(name, ()):
                before = before._replace(**{field: getattr(after, field)})
            detectors.append(before)
        return kept._replace(change_expected=skipped & expected, detectors=tuple(detectors))

    def expect_change(self, state: EngineState, *, xp: ArrayNamespace | ModuleType) -> EngineState:
        """Opens the grace window at the next step, because the LR, the batch or the data change.

        Baselines restart their warm-up. For `grace_steps` steps only non-finite values are alarms.

        Args:
            state: the state before the change.
            xp: not used. All methods that return a state take it.
        """
        del xp
        return state._replace(change_expected=numerics.true_like(state.change_expected))

    def on_rollback(
        self, live: EngineState, restored: EngineState, *, xp: ArrayNamespace | ModuleType
    ) -> EngineState:
        """Combines the restored detectors with the live budget and limits after a rollback.

        The LR multiplier and the limit of the gradient norm stay as they are in the live state,
        except that a lower LR limit of the checkpoint is in force again. Since the checkpoint,
        health has raised the limit, or a later cut began at a higher rate.

        This call subtracts the rollback from the budget, so a declined order costs nothing. It also
        resets the count of healthy steps, so that earlier health does not raise a new limit.

        Args:
            live: the state at the moment of the rollback.
            restored: the state in the checkpoint.
            xp: the array namespace.
        """
        xp = as_namespace(xp)
        incident, budget = live.incident, live.budget
        then = restored.lr
        raised = (then.rate_at_cut > 0) & (then.rate_at_cut < live.lr.rate_at_cut)
        return restored._replace(
            incident=incident._replace(
                open=numerics.false_like(incident.open),
                only_skips=numerics.false_like(incident.only_skips),
                quiet=numerics.zero_like(incident.quiet),
            ),
            budget=budget._replace(
                recoveries=numerics.decremented(budget.recoveries, xp=xp),
                healthy_steps=numerics.zero_like(budget.healthy_steps),
            ),
            lr=live.lr._replace(
                rate_at_cut=xp.where(raised, then.rate_at_cut, live.lr.rate_at_cut),
                rate_after_cut=xp.where(raised, then.rate_after_cut, live.lr.rate_after_cut),
            ),
            norm_limit=live.norm_limit,
            tally=live.tally._replace(rollbacks=live.tally.rollbacks + 1),
            last=live.last,
        )

    def subtract_rollback(
        self, state: EngineState, *, xp: ArrayNamespace | ModuleType
    ) -> EngineState:
        """Subtracts a rollback that the last step ordered from the budget.

        For observe mode and replays, in which no host rolls back.

        Args:
            state: the state after the step.
            xp: the array namespace of the state.
        """
        xp = as_namespace(xp)
        ordered = (state.last.decision.action & int(Action.ROLLBACK)) != 0
        recoveries = xp.where(ordered, state.budget.recoveries - 1, state.budget.recoveries)
        return state._replace(budget=state.budget._replace(recoveries=recoveries))

    def specialised_for(self, state: EngineState) -> Engine:
        """The engine for the steps from `state` on, until the host changes the state.

        The host sets limits at a rollback: of the learning rate (a policy without cuts needs the
        schedule's rate only for this) and of the gradient norm. The returned engine decides the
        same, without the operations of a limit that `state` does not have. States with the same
        kinds of limits give the same object, so that a step is compiled once for it.

        Args:
            state: the state, in NumPy.
        """
        may_be_refunded = np.any(state.budget.lr_cuts < self.config.budget.lr_cuts)
        limits_rate = bool(self.cuts_lr or may_be_refunded or np.any(state.lr.rate_at_cut > 0))
        limits_norm = self.limits_norm and bool(np.any(state.norm_limit != 0))
        if limits_rate and limits_norm == self.limits_norm:
            return self
        key = limits_rate, limits_norm
        if key not in self._specialised:
            config = self.config
            if not limits_rate:
                config = config._replace(lr=config.lr._replace(ceiling=0.0))
            self._specialised[key] = Engine(config, limits_norm=limits_norm)
        return self._specialised[key]

    def limit_lr(
        self,
        state: EngineState,
        limit: Float,
        rate: Float | None,
        *,
        xp: ArrayNamespace | ModuleType,
    ) -> EngineState:
        """Sets a limit on the learning rate for the host; no effect if no cuts are left.

        Args:
            state: the live state.
            limit: upper limit of the learning rate, float32 array. 0 or less limits the rate to the
                schedule's current rate.
            rate: the schedule's current learning rate, float32 array, or None for a constant rate
                of 1.
            xp: the array namespace.
        """
        namespace = as_namespace(xp)
        budget, tally = state.budget, state.tally
        config = self.config.lr
        if not self.cuts_lr:  # the limit itself is in force, without a hold and a ramp
            config = config._replace(hold_steps=0, ramp_steps=0)
        limited = state._replace(
            lr=learning_rate.limited_rate(config, state.lr, limit, rate, xp=namespace),
            budget=budget._replace(lr_cuts=budget.lr_cuts - 1),
            tally=tally._replace(lr_cuts=tally.lr_cuts + 1),
        )
        allowed = budget.lr_cuts > 0

        def allowed_or_old(new: Array, old: Array) -> Array:
            return select(allowed, new, old, xp=namespace)

        return map_leaves(allowed_or_old, limited, state)

    def limit_norm(
        self, state: EngineState, limit: Float | None, *, xp: ArrayNamespace | ModuleType
    ) -> EngineState:
        """Sets or releases a limit on the gradient norm for the host; this costs no budget.

        From the next step on, a finite gradient whose norm is above the limit is scaled down to it,
        as by `torch.nn.utils.clip_grad_norm_`, also under a policy without clipping. The limit
        stays until this method changes it, also over a rollback.

        Args:
            state: the live state.
            limit: largest norm of the gradients, float32 array, 0-d or of the state's batch shape.
                0, None or a number that cannot be a limit (negative, NaN, Inf) releases the limit.
            xp: the array namespace.
        """
        xp = as_namespace(xp)
        none = numerics.zero_like(state.norm_limit)
        given = none
        if limit is not None:
            given = limit
        is_limit = (given > numerics.FLUSH) & (given <= numerics.FLOAT32_MAX)
        state = state._replace(norm_limit=xp.where(is_limit, given, none))
        if self.config.clip is not None:
            return state
        # Without clipping and without a limit a step does not write the factor, which is 1.
        last = state.last.decision
        factor = xp.where(state.norm_limit > 0, last.grad_scale, 1.0)
        last = last._replace(grad_scale=factor)
        return state._replace(last=state.last._replace(decision=last))

    def freeze(self, state: EngineState) -> EngineState:
        """Makes the engine skip all steps from the next one on, until the host calls `limit_norm`.

        A frozen step changes neither weights nor moments. It is a skip without a cause: it opens
        no incident and costs no budget.

        Args:
            state: the state before the first frozen step.
        """
        frozen = numerics.zero_like(state.norm_limit) + FROZEN
        return state._replace(norm_limit=frozen)

    def apply_rate(
        self, state: EngineState, rate: Float, *, xp: ArrayNamespace | ModuleType
    ) -> EngineState:
        """Recomputes the multiplier for another learning rate of the schedule; hold and ramp stay.

        A rollback restores the schedule, and a cut limits the rate in absolute terms. At a lower
        rate of the schedule the multiplier is therefore higher.

        Args:
            state: a state without an open incident.
            rate: the schedule's learning rate, float32 array.
            xp: the array namespace.
        """
        xp = as_namespace(xp)
        never = state.step < 0
        cut = None
        if self.cuts_lr:
            cut = never
        orders = RecoveryOrders(healthy=~never, refund=never, cut=cut)
        rescaled = learning_rate.update_rate(self.config.lr, state.lr, orders, never, rate, xp=xp)
        return state._replace(lr=state.lr._replace(scale=rescaled.scale))

    def metrics(self, state: EngineState) -> dict[str, Any]:
        """Names the numbers of the last step for a logger.

        Args:
            state: the state after the step.

        Returns:
            0-d arrays by name, see `record_metrics`. Nothing is copied from a device.
        """
        numbers = zip(RECORD_FIELDS, record_numbers(state), strict=True)
        return record_metrics({**dict(numbers), **state.tally._asdict()})

    def to_dict(self, state: EngineState) -> dict[str, Any]:
        """Converts the state of any backend to JSON-safe Python data; this syncs the device.

        Args:
            state: a state without batch axes.

        Returns:
            `{"schema": SCHEMA, "policy": fingerprint, "clip": name, "detectors": [names],
            "groups": n, "unknown_rate": -1.0, "state": {...}}`, from which `from_dict` restores the
            state on any machine.
        """
        scale = state.last.decision.group_scale
        groups = 0
        if scale is not None:
            groups = int(np.asarray(scale).shape[-1])
        return {
            "schema": SCHEMA,
            "policy": self.fingerprint,
            "clip": self._clip_name,
            "detectors": [name for name, _ in self.config.detectors],
            "groups": groups,
            "unknown_rate": UNKNOWN_RATE,
            "state": to_json_data(state),
        }

    def from_dict(self, data: Mapping[str, Any]) -> EngineState:
        """Restores a saved state.

        Args:
            data: the result of `to_dict`, perhaps read from a file.

        Returns:
            The state as NumPy arrays.

        Raises:
            StateError: the data are damaged, of another policy, or of another release's schema.
        """
        if not isinstance(data, Mapping):
            raise StateError(f"a saved state must be a mapping, got {type(data).__name__}")
        if data.get("schema") != SCHEMA or isinstance(data.get("schema"), bool):
            raise StateError(
                f"the saved state has schema {data.get('schema')!r}, but this version reads "
                f"{SCHEMA}: start from a fresh state, or use the version that wrote it"
            )
        clip, names = self._clip_name, [name for name, _ in self.config.detectors]
        if data.get("clip") != clip or data.get("detectors") != names:
            raise StateError(
                f"the saved state belongs to a policy with clip {data.get('clip')!r} and detectors "
                f"{data.get('detectors')}, but this policy has clip {clip!r} and detectors "
                f"{names}: load the state with its own policy, or start from a fresh state"
            )
        saved = data.get("policy")  # None for a policy with arrays as numbers
        if saved is not None and self.fingerprint is not None and saved != self.fingerprint:
            raise StateError(
                "the saved state belongs to a policy with other numbers: its fingerprint is "
                f"{saved!r:.40}, not {self.fingerprint!r}; load the state with its own policy, or "
                "start from a fresh state, whose detectors warm up again"
            )
        count = data.get("groups")
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= _MAX_GROUPS:
            raise StateError(f"groups must be a whole number up to {_MAX_GROUPS}, got {count!r}")
        state = from_json_data(self.init(groups=count), data.get("state"), "state")
        if "unknown_rate" not in data:  # an older healcore has saved the state
            return with_unknown_rate(state, reads_rate=self.scales_lr)
        if data["unknown_rate"] != UNKNOWN_RATE:
            raise StateError(
                f"unknown_rate must be {UNKNOWN_RATE}, got {data['unknown_rate']!r:.80}: the saved "
                "state is damaged, or a newer release wrote it"
            )
        return state


def _neutral(decision: Decision, when: Flag, lr_scale: Float, *, xp: ArrayNamespace) -> Decision:
    """Replaces the decision by a neutral one where `when` holds; the causes stay."""
    group_scale = decision.group_scale
    if group_scale is not None:
        group_scale = xp.where(when[..., None], 1.0, group_scale)
    return decision._replace(
        grad_scale=xp.where(when, 1.0, decision.grad_scale),
        skip=decision.skip & ~when,
        lr_scale=xp.where(when, lr_scale, decision.lr_scale),
        action=xp.where(when, 0, decision.action),
        rollback_depth=xp.where(when, 0, decision.rollback_depth),
        group_scale=group_scale,
    )
