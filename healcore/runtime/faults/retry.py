"""Repeats calls that fail in the network."""

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

_MAX_SERVER_WAIT_S = 3600.0
"""Longest wait that a server may ask for; a call is not repeated after a longer one."""

_random = SystemRandom().random
"""Returns a random number from 0 to 1 without changing the run's random state."""


class Attempt(NamedTuple):
    """One attempt at a call, for the log."""

    call: str
    """Name of the function."""
    number: int
    """Number of the attempt, from 1."""
    error: BaseException | None = None
    """The exception, or None after a success."""
    fault: Fault | None = None
    wait_s: float | None = None
    """Seconds until the next attempt, or None for the last attempt."""

    def __str__(self) -> str:
        if self.fault is None:
            return f"{self.call} has succeeded at attempt {self.number}"
        then = "gives up" if self.wait_s is None else f"again in {self.wait_s:.1f} s"
        error = f"{type(self.error).__name__}: {self.error}"
        return (
            f"{self.call} failed ({self.fault.sign}, attempt {self.number}), {then}: {error:.300}"
        )


def retrying(call: Callable[P, T], policy: PolicyLike = "default") -> Callable[P, T]:
    """Wraps a function so that a call is repeated after a transient failure in the network.

        upload = healcore.retrying(api.upload_file)
        upload(path_or_fileobj="model.safetensors", ...)

    Transient failures by `classify` are timeouts, connections that are refused or lost, and the
    HTTP statuses 408, 425, 429 and 5xx except 501 and 505. All other exceptions propagate at once,
    and so does the last exception after `[retry] attempts`. The call must be idempotent: it may
    already have run.

    Args:
        call: function to call; no coroutine function and no generator function.
        policy: its rule for `network` and its `[retry]` apply. Without such a rule, or if the
            policy only observes, no call is repeated.

    Raises:
        TypeError: `call` is a coroutine or generator function, whose call cannot fail.
        healcore.policy.PolicyError: the policy does not exist or is invalid.
    """
    host = HostPolicy.of(policy)
    retry = host.retry if "retry" in host.answers(Cause.NETWORK) else None
    return repeated(call, retry, report=_log, sleep=time.sleep)


def _log(attempt: Attempt) -> None:
    write = console.info if attempt.error is None else console.warning
    write(str(attempt))


def repeated(
    call: Callable[P, T],
    retry: Retry | None,
    *,
    report: Callable[[Attempt], object],
    sleep: Callable[[float], None],
) -> Callable[P, T]:
    """`retrying` with the `[retry]` table of a policy, and with a report of the attempts.

    Args:
        call: as for `retrying`.
        retry: when to repeat the call, or None for never.
        report: receives each attempt that fails in the network, and the attempt that succeeds after
            a failure.
        sleep: waits a number of seconds; its exceptions end the call.
    """
    name = getattr(call, "__qualname__", None) or repr(call)[:80]
    if inspect.iscoroutinefunction(call) or inspect.isgeneratorfunction(call):
        raise TypeError(
            f"{name} is a coroutine or a generator function, which fails only when it is "
            "awaited or iterated over: pass an ordinary function that does that"
        )
    rules = Retry(attempts=1) if retry is None else retry

    def before_sleep(state: Any) -> None:
        error = state.outcome.exception()
        fault, number = classify(error), state.attempt_number
        report(Attempt(name, number, error, fault, state.upcoming_sleep))

    @functools.wraps(call)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        loop = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_retried),
            stop=tenacity.stop_after_attempt(rules.attempts),
            wait=functools.partial(_delay, rules),
            sleep=sleep,
            before_sleep=before_sleep,
            reraise=True,
        )
        try:
            result = loop(functools.partial(call, *args, **kwargs))
        except Exception as error:
            if (fault := classify(error)).cause is Cause.NETWORK:
                report(Attempt(name, loop.statistics["attempt_number"], error, fault))
            raise
        if loop.statistics["attempt_number"] > 1:
            report(Attempt(name, loop.statistics["attempt_number"]))
        return result

    return again


def _delay(rules: Retry, state: Any) -> float:
    """Seconds to wait after an attempt.

    The wait grows exponentially up to `max_delay_s`, less a random part. A longer wait that the
    server asks for has priority, even beyond `max_delay_s`.
    """
    grows = tenacity.wait_exponential(rules.base_delay_s, rules.max_delay_s, rules.factor)
    asked = classify(state.outcome.exception()).retry_after_s or 0.0
    return max(grows(state) * (1 - rules.jitter * _random()), asked)


def _is_retried(error: BaseException) -> bool:
    """Whether a call that raised this exception is repeated."""
    fault = classify(error)
    return fault.transient and (fault.retry_after_s or 0.0) <= _MAX_SERVER_WAIT_S
