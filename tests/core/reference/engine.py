"""The reference engine: rules, skips, incidents, budgets and the LR multiplier as plain Python.

Same configuration objects as the core, no code of it.
"""

import math
from collections import deque
from typing import Any, NamedTuple

from healcore.core.decision import Action, Cause
from healcore.core.signals import Signals
from tests.core.reference import clips, detectors
from tests.core.reference.detectors import Step
from tests.core.reference.ties import Ties

HUGE = 999999986991104.0
"""1e15 as a float32 has it."""
BAD = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD)


class Verdict(NamedTuple):
    """The core's Decision, in Python numbers."""

    grad_scale: float
    skip: bool
    lr_scale: float
    action: int
    cause: int
    rollback_depth: int
    group_scale: list[float] | None


class Report(NamedTuple):
    """The core's metrics: of the last step, and counts so far."""

    threshold: float = 0.0
    z: float = 0.0
    clips: int = 0
    skips: int = 0
    alarms: int = 0
    rollbacks: int = 0
    lr_cuts: int = 0
    incidents: int = 0


class Rule:
    """One `[[respond]]`: its row, its window, when it last fired."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.row = 0
        self.window: deque[bool] = deque(maxlen=config.within)
        self.silent = math.inf

    def see(self, alarmed: int, sustained: int, quiet_steps: int) -> tuple[bool, bool]:
        c = self.config
        hit = bool((sustained if c.sustained else alarmed) & c.causes)
        self.row = self.row + 1 if hit else 0
        self.window.append(hit)
        fired = hit and self.row >= c.consecutive
        if c.within:
            fired = fired and sum(self.window) >= c.count
        fresh = fired and self.silent >= quiet_steps
        self.silent = 0 if fired else self.silent + 1
        return fired, fresh


class Incident:
    """One contiguous run of alarms; its escalation, and that across neighbours."""

    def __init__(self, config: Any, rollback: Any) -> None:
        self.config, self.rollback = config, rollback
        self.open, self.quiet, self.number = False, 0, 0
        self.only_skips = False
        self.onset = -1
        self.since: dict[str, int | None] = {"rollback": None, "cut": None}
        self.last_onset: int | None = None
        self.escalations = 0

    @property
    def serious(self) -> bool:
        """Whether one is open in which a step may have changed the model."""
        return self.open and not self.only_skips

    def see(self, step: int, alarm: bool, harmless: bool, acts: bool) -> None:
        """Opens or closes the incident.

        `harmless`: not finite, and skipped; `acts`: and a rule goes back or cuts for it.
        """
        if alarm and (not self.open or (self.only_skips and not harmless)):
            self.number += 1
            self.onset = step
            self.since = {"rollback": None, "cut": None}
            self.open, self.only_skips, self.quiet = True, harmless, 0
        elif alarm and harmless and not acts and not self.only_skips:
            return
        if acts:
            self.only_skips = False
        self.quiet = 0 if alarm else self.quiet + 1
        if self.quiet >= self.config.quiet_steps:
            self.open = False

    def wants(self, what: str, wish: bool, alarm: bool, along: bool = False) -> bool:
        """Whether a request becomes an order: the first, or after `patience` more alarms."""
        since = self.since[what]
        if wish and (along or since is None or since >= self.config.patience):
            self.since[what] = 0
            return True
        if since is not None and alarm:
            self.since[what] = since + 1
        return False

    def depth(self) -> int:
        """The depth of a rollback ordered now; it grows with each one in the same region."""
        near = self.last_onset is not None and (self.onset - self.last_onset < self.rollback.region)
        self.escalations = self.escalations + 1 if near else 0
        self.last_onset = self.onset
        return self.rollback.depth + self.rollback.deepen * self.escalations


def _known_rate(schedule: float | None) -> float:
    """The schedule's rate, 0 up to 1e-12, and 1 for one that is unknown, negative or too large."""
    if schedule is None or not -1e-12 <= schedule < 1e12:
        return 1.0
    return schedule if schedule > 1e-12 else 0.0


class Multiplier:
    """The learning rate's multiplier: cut, hold, ramp; absolute where the schedule is known."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.scale = 1.0
        self.rate_after_cut: float | None = None
        """The rate that the last cut left; None before the first."""
        self.rate_at_cut = 0.0
        """The rate that was in force at the last cut, and what health has raised it to."""
        self.peak = 0.0
        """The schedule's highest rate since the last cut, or since it fell by half in one step."""
        self.rate = 0.0
        """The schedule's rate at the last step."""
        self.hold = self.ramp = 0

    def see(
        self, cut: bool, healthy: bool, incident: bool, refund: bool, schedule: float | None
    ) -> float:
        c = self.config
        rate = _known_rate(schedule)
        scale = self.scale
        if cut or (rate > 0 and (self.rate == 0 or rate < self.rate / 2)):
            self.peak = rate
        elif rate > 0:
            self.peak = max(rate, self.peak)
        self.rate = rate
        if refund:
            self.rate_at_cut = min(self.rate_at_cut / c.factor, 1e12)
        if cut:
            self.rate_at_cut = self.scale * (rate or 1.0)
            self.scale = min(self.scale, max(c.factor * self.scale, c.floor))
            self.rate_after_cut = self.scale * (rate or 1.0)
            self.hold, self.ramp = c.hold_steps, c.ramp_steps
        elif self.rate_after_cut is not None:
            limited = c.ceiling > 0 and self.peak > 0
            top = min(1.0, c.ceiling * self.rate_at_cut / self.peak) if limited else 1.0
            bottom = min(top, self.rate_after_cut / (rate or 1.0))
            if incident:
                self.scale = min(self.scale, top)
            elif self.hold > 0:
                self.hold -= healthy
                self.scale = bottom
            else:
                self.ramp = max(0, self.ramp - healthy)
                gone = 1.0 if not self.ramp else (c.ramp_steps - self.ramp) / c.ramp_steps
                self.scale = top if gone == 1.0 else bottom + (top - bottom) * gone
            if rate == 0:  # no multiplier is wrong there
                self.scale = scale
        return self.scale

    def limit(self, limit: float, schedule: float | None) -> None:
        """The host holds the rate at most at `limit`, as after a cut that has left this rate."""
        rate = _known_rate(schedule)
        self.scale = min(1.0, limit / rate) if rate else self.scale
        self.rate_after_cut = limit
        self.rate_at_cut = min(limit / (self.config.ceiling or 1.0), 1e12)
        self.peak = self.rate = rate
        self.hold, self.ramp = self.config.hold_steps, self.config.ramp_steps


class Engine:
    """A whole policy."""

    def __init__(self, config: Any, *, groups: int = 0) -> None:
        self.config = config
        self.ties = Ties()
        self.step = self.grace = 0
        self.announced = False
        """Whether a change was announced for the next step that the caller does not skip."""
        self.clip = None
        if config.clip is not None:
            name, settings = config.clip.kind, config.clip
            extra = (groups,) if name == "adagc" else ()
            self.clip = clips.RULES[name](settings, self.ties, *extra)
        self.per_tensor = config.clip is not None and config.clip.kind == "adagc"
        self.groups = groups
        self.detectors = []
        for name, settings in config.detectors:
            kind, needs = detectors.DETECTORS[name]
            self.detectors.append((kind(settings, self.ties), needs, name == "nonfinite"))
        self.rules = [Rule(each) for each in config.rules]
        self.finite_skip_streak = 0
        self.incident = Incident(config.incident, config.rollback)
        self.recoveries, self.cuts = config.budget.recoveries, config.budget.lr_cuts
        self.healthy = 0
        self.lr = Multiplier(config.lr)
        self.norm_limit: float | None = None
        self.frozen = False
        self.report = Report()
        acting = int(Action.ROLLBACK | Action.CUT_LR | Action.STOP)
        self.trouble = BAD
        for rule in config.rules:
            if rule.skip or rule.action & acting:
                self.trouble |= rule.causes

    def neutral(self, lr_scale: float, cause: int = 0) -> Verdict:
        """Nothing is done."""
        group = [1.0] * self.groups if self.per_tensor else None
        return Verdict(1.0, False, lr_scale, 0, cause, 0, group)

    def see(self, seen: Signals) -> Verdict:
        """One step, of Python numbers."""
        self.ties.forget()
        restart = self.announced = bool(seen.change_expected) or self.announced
        if seen.externally_skipped:
            step, _ = _observed(seen, restart, self.config.clip is not None)
            for detector, needs, _ in self.detectors:
                if all(getattr(seen, each) is not None for each in needs):
                    detector.see_dropped(step)
            return self.neutral(1.0 if self.config.mode == "observe" else self.lr.scale)
        self.announced = False
        self.grace = self.config.grace_steps if restart else max(0, self.grace - 1)
        step, groups = _observed(seen, restart, self.config.clip is not None)
        alarmed, sustained = self._causes(step, seen)
        cause = alarmed | sustained
        fired = [
            (rule.config, *rule.see(alarmed, sustained, self.config.incident.quiet_steps))
            for rule in self.rules
        ]
        skip_wished = any(f for rule, f, _ in fired if rule.skip)
        skip_by_rules = self._skip(step, skip_wished)
        skip = skip_by_rules or self.frozen
        scale = 1.0
        group_scale = [1.0] * self.groups if self.per_tensor else None
        clipped = clips.Clipped(1.0, False, self.report.threshold, self.report.z)
        if self.clip is not None and seen.grad_norm is not None:
            learn = step.finite and not skip
            clipped = self.clip.see(step.norm or 0.0, groups, learn, restart)
            if not skip and self.per_tensor:
                group_scale = clipped.scale
            elif not skip:
                scale = clipped.scale
        most = 1.0 if skip else self._factor_of_limit(seen.grad_norm)
        if group_scale is None:
            scale = min(scale, most)
        else:
            group_scale = [min(each, most) for each in group_scale]
        action, depth = self._recovery_orders(cause, fired, skip_by_rules, step.rate)
        self.step += 1
        old = self.report
        self.report = Report(
            threshold=clipped.threshold,
            z=clipped.z,
            clips=old.clips + (most < 1 or (clipped.clipped and not skip)),
            skips=old.skips + skip,
            alarms=old.alarms + (cause != 0),
            rollbacks=old.rollbacks,  # counted where it is carried out
            lr_cuts=old.lr_cuts + bool(action & Action.CUT_LR),
            incidents=self.incident.number,
        )
        if self.config.mode == "observe":  # nobody carries out what is ordered
            self.recoveries -= bool(action & Action.ROLLBACK)
            return self.neutral(1.0, cause)
        return Verdict(scale, skip, self.lr.scale, action, cause, depth, group_scale)

    def _causes(self, step: Step, seen: Signals) -> tuple[int, int]:
        alarmed = sustained = 0
        for detector, needs, always in self.detectors:
            if any(getattr(seen, each) is None for each in needs):
                continue
            alarm, lasting, flags = detector.see(step)
            if always or self.grace == 0:
                alarmed |= flags if alarm else 0
                sustained |= flags if lasting else 0
        return alarmed, sustained

    def _skip(self, step: Step, wished: bool) -> bool:
        if not step.finite:
            return wished or step.bad_grad
        if not wished:
            self.finite_skip_streak = 0
            return False
        if self.finite_skip_streak >= self.config.max_skips:
            return False
        self.finite_skip_streak += 1
        return True

    def _factor_of_limit(self, norm: float | None) -> float:
        if self.norm_limit is None or norm is None:
            return 1.0
        over = self.ties.above(norm, self.norm_limit)
        return clips.factor(self.norm_limit, norm) if over else 1.0

    def roll_back(self) -> None:
        """The host carries a rollback out, to a state with the present detectors."""
        self.recoveries = max(0, self.recoveries - 1)
        self.healthy = 0
        self.incident.open = self.incident.only_skips = False
        self.incident.quiet = 0
        self.report = self.report._replace(rollbacks=self.report.rollbacks + 1)

    def limit_lr(self, limit: float, schedule: float | None) -> None:
        """The host limits the learning rate, if the budget has a cut left."""
        if self.cuts > 0:
            self.cuts -= 1
            self.lr.limit(limit, schedule)
            self.report = self.report._replace(lr_cuts=self.report.lr_cuts + 1)

    def limit_norm(self, limit: float) -> None:
        """The host holds the gradients' norm at most at `limit`; 0 lets go of it."""
        self.norm_limit = limit or None
        self.frozen = False

    def freeze(self) -> None:
        """The host takes no step until it limits the norm or lets go of it."""
        self.norm_limit, self.frozen = None, True

    def _recovery_orders(
        self, cause: int, fired: list[Any], skip: bool, rate: float | None
    ) -> tuple[int, int]:
        alarm = bool(cause & self.trouble)

        def wish(what: Action) -> bool:
            return any(f for rule, f, _ in fired if rule.action & what)

        harmless = skip and not cause & self.trouble & ~BAD
        acts = harmless and wish(Action.ROLLBACK | Action.CUT_LR)
        self.incident.see(self.step, alarm, harmless, acts)
        cuts = self.incident.wants("cut", wish(Action.CUT_LR), alarm)
        recover = self.incident.wants("rollback", wish(Action.ROLLBACK), alarm, cuts)
        depth = self.incident.depth() if recover else 0
        asked = recover or cuts
        spent = recover and self.recoveries == 0
        cut = cuts and self.cuts > 0
        recover = recover and not spent
        self.cuts -= cut  # a rollback is subtracted where it is carried out
        serious = self.incident.serious
        healthy = not serious and not alarm
        self.healthy = 0 if serious or asked else self.healthy + healthy
        refund = self.healthy >= self.config.budget.refund_after
        if refund:
            self.healthy = 0
            self.recoveries = min(self.recoveries + 1, self.config.budget.recoveries)
            self.cuts = min(self.cuts + 1, self.config.budget.lr_cuts)
        self.lr.see(cut, healthy, serious, refund, rate)
        action = int(Action.ROLLBACK * recover | Action.CUT_LR * cut)
        if spent:
            action |= int(Action.STOP if cause & BAD else Action.ALERT)
        for rule, _, fresh in fired:
            if fresh:
                action |= rule.action & int(Action.ALERT | Action.SAVE | Action.STOP)
        return action, depth if recover else 0


def _observed(seen: Signals, restart: bool, clips: bool) -> tuple[Step, list[float] | None]:
    """The numbers, made finite and small enough for float32 to square.

    A policy that clips takes no gradient that it cannot scale in float32.
    """
    most = 1e15 if clips else 3.4028234663852886e38
    loss, norm = seen.loss, seen.grad_norm
    bad_loss = loss is not None and not math.isfinite(loss)
    bad_grad = not all(_is_norm(each, most) for each in [norm, *(seen.group_norms or [])])
    step = Step(
        loss=_bounded(loss),
        norm=_bounded(norm if _is_norm(norm, most) else 0.0),
        evaluation=_bounded(seen.eval_loss) if _is_finite(seen.eval_loss) else None,
        bad_loss=bad_loss,
        bad_grad=bad_grad,
        finite=not (bad_loss or bad_grad),
        restart=restart,
        rate=seen.learning_rate,
    )
    groups = seen.group_norms
    if groups is not None:
        groups = [_bounded(each if _is_norm(each, most) else 0.0) for each in groups]
    return step, groups


def _is_finite(x: Any) -> bool:
    return x is not None and math.isfinite(x)


def _is_norm(x: Any, most: float = 3.4028234663852886e38) -> bool:
    """Whether it is not negative (except by rounding) and at most `most`."""
    return x is None or -1e-12 <= x <= most


def _bounded(x: Any) -> Any:
    if x is None:
        return None
    if not math.isfinite(x) or abs(x) < 1e-12:
        return 0.0
    return max(-HUGE, min(HUGE, x))
