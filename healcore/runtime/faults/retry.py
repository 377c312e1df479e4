"""Repeats a call that has failed in the network, without repeating anything else of the run."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from random import SystemRandom
from typing import Any, NamedTuple, ParamSpec, TypeVar

import tenacity

from healcore import console
from healcore.core.verdict import Cause
from healcore.policy import PolicyLike
from healcore.policy.recovery import Retry
from healcore.runtime.faults.classify import classify
from healcore.runtime.faults.failures import Fault
from healcore.runtime.host_policy import HostPolicy

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST_S = 3600.0
"""A server that asks to wait longer than an hour is not waited for."""

own_random = SystemRandom().random
"""Draws for the waits; a run's own random state stays as it is."""


class Attempt(NamedTuple):
    """One attempt at a call, for the log."""

    call: str
    """Name of the function."""
    number: int
    """Counts from 1."""
    error: Exception | None = None
    """None: it has succeeded."""
    fault: Fault | None = None
    wait_s: float | None = None
    """Seconds until the next attempt; None: there is none."""

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.call} has succeeded at attempt {self.number}"
        sign = "" if self.fault is None else f"{self.fault.sign}, "
        then = "gives up" if self.wait_s is None else f"again in {self.wait_s:.1f} s"
        what = f"{type(self.error).__name__}: {self.error}"
        return f"{self.call} failed ({sign}attempt {self.number}), {then}: {what:.300}"


def retrying(
    call: Callable[P, T],
    policy: PolicyLike = "default",
    *,
    sleep: Callable[[float], None] = time.sleep,
    random: Callable[[], float] = own_random,
) -> Callable[P, T]:
    """A function that makes a call, and makes it again after a failure in the network that passes.

        upload = healcore.retrying(api.upload_file)
        upload(path_or_fileobj="model.safetensors", ...)

    Repeated are timeouts, connections that are refused or lost, and the HTTP statuses 408, 425,
    429 and 5xx except 501 and 505: what `classify` calls transient. Everything else is raised at
    once, and so is the last error after `[retry] attempts`. The call has to be one that may be made
    twice: a request whose answer is lost may have been carried out.

    Args:
        call: what to call; not a coroutine function and not a generator.
        policy: its rule for `network` and its `[retry]`. Without such a rule, or if it only
            observes, nothing is repeated.
        sleep: waits the given seconds.
        random: a number from 0 to 1, for the random part of a wait.

    Raises:
        TypeError: `call` is a coroutine function or a generator, which fails only later.
        healcore.policy.PolicyError: there is no such policy, or it is not a valid one.
    """
    host = HostPolicy.of(policy)
    retry = host.retry if "retry" in host.answers(Cause.NETWORK) else None
    return repeated(call, retry, report=_log, sleep=sleep, random=random)


def _log(attempt: Attempt) -> None:
    write = console.info if attempt.error is None else console.warning
    write(str(attempt))


def repeated(
    call: Callable[P, T],
    retry: Retry | None,
    *,
    report: Callable[[Attempt], object],
    sleep: Callable[[float], None],
    random: Callable[[], float] = own_random,
) -> Callable[P, T]:
    """A function that makes a call again after a failure in the network that passes.

    Args:
        call: as for `retrying`.
        retry: when to make the call again; None: never.
        report: receives each attempt that has failed in the network, and the one that succeeds
            after that.
        sleep: waits; what it raises ends the call.
        random: as for `retrying`.
    """
    if inspect.iscoroutinefunction(call) or inspect.isgeneratorfunction(call):
        raise TypeError(
            f"{_name(call)} is a coroutine or a generator function: its call fails only when it is "
            "awaited or iterated over. Pass an ordinary function that does that"
        )
    rules = Retry(attempts=1) if retry is None else retry

    def wait(state: tenacity.RetryCallState) -> float:
        return delay(rules, state.attempt_number, _fault(state), random())

    @functools.wraps(call)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        failed: list[Exception] = []
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if classify(error).cause is not Cause.NETWORK:
                raise
            failed.append(error)

        def next_attempt() -> T:
            if failed:  # the first attempt, which was made without the cost of what follows
                raise failed.pop()
            return call(*args, **kwargs)

        def before_sleep(state: tenacity.RetryCallState) -> None:
            number, wait_s = state.attempt_number, state.upcoming_sleep
            report(Attempt(_name(call), number, _error(state), _fault(state), wait_s))

        loop = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: is_retried(classify(error))),
            stop=tenacity.stop_after_attempt(rules.attempts),
            wait=wait,
            sleep=sleep,
            before_sleep=before_sleep,
            reraise=True,
        )
        try:
            result = loop(next_attempt)
        except Exception as error:
            fault = classify(error)
            if fault.cause is Cause.NETWORK:
                report(Attempt(_name(call), loop.statistics["attempt_number"], error, fault))
            raise
        report(Attempt(_name(call), loop.statistics["attempt_number"]))
        return result

    return again


def delay(retry: Retry, attempt: int, fault: Fault, random: float) -> float:
    """Seconds to wait after an attempt, which counts from 1.

    Exponential, at most `max_delay_s`, less the random part. A server that asks for more time gets
    it, even beyond `max_delay_s`: a request before that would be refused again.
    """
    try:
        wait = min(retry.base_delay_s * retry.factor ** (attempt - 1), retry.max_delay_s)
    except OverflowError:
        wait = retry.max_delay_s
    return max(wait * (1 - retry.jitter * random), fault.retry_after_s or 0.0)


def is_retried(fault: Fault) -> bool:
    """Whether a call that failed with this fault may succeed the next time, soon enough."""
    return fault.transient and (fault.retry_after_s or 0.0) <= _LONGEST_S


def _error(state: tenacity.RetryCallState) -> Any:
    return None if state.outcome is None else state.outcome.exception()


def _fault(state: tenacity.RetryCallState) -> Fault:
    return classify(_error(state))


def _name(call: Callable[..., Any]) -> str:
    return getattr(call, "__qualname__", None) or repr(call)[:80]
