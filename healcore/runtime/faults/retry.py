"""Repeats calls that fail in the network."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import SystemRandom
from typing import NamedTuple, ParamSpec, Protocol, TypeVar, cast

from healcore import console
from healcore.core.decision import Cause
from healcore.policy import PolicyLike
from healcore.policy.responses import Retry
from healcore.runtime.faults.classification import Fault, classify
from healcore.runtime.run_options import HostPolicy

P = ParamSpec("P")
T = TypeVar("T")

_MAX_SERVER_WAIT_S = 3600.0  # a call is not repeated if a server asks for a longer wait
_random = SystemRandom().random  # from 0 to 1, without changing the run's random state


class CallAttempt(NamedTuple):
    """One attempt at a call, for the log."""

    line: str
    """What happened, as a line of the log."""
    number: int
    """Number of the attempt, from 1."""
    fault: Fault | None = None
    """The classified exception, or None after a success."""
    wait_s: float | None = None
    """Seconds until the next attempt, or None for the last attempt."""


class _OpenHealer(Protocol):
    """An open `Healer`, whose class is in a higher layer."""

    def _retries(self, name: str) -> Retries: ...


def retrying(call: Callable[P, T], policy: PolicyLike | _OpenHealer = "default") -> Callable[P, T]:
    """Wraps a function so that a call is repeated after a transient failure in the network.

        upload = healcore.retrying(api.upload_file)
        upload(path_or_fileobj="model.safetensors")

    Transient failures by `classify` are timeouts, connections that are refused or lost, and the
    HTTP statuses 408, 425, 429 and 5xx except 501 and 505. All other exceptions propagate at once,
    and so does the last exception after `[retry] attempts`. The call must be idempotent: it may
    already have run.

    Args:
        call: function to call; no coroutine function and no generator function.
        policy: its rule for `network` and its `[retry]` apply. Without such a rule, or if the
            policy only observes, no call is repeated. With an open Healer its policy applies: each
            failed attempt is then an event, and a signal that asks the run to end ends the wait.

    Returns:
        A function with the same parameters and result.

    Raises:
        TypeError: `call` is a coroutine or generator function, whose call cannot fail.
        healcore.policy.PolicyError: the policy does not exist or is invalid.
    """
    name = getattr(call, "__qualname__", None) or repr(call)[:80]
    if inspect.iscoroutinefunction(call) or inspect.isgeneratorfunction(call):
        raise TypeError(
            f"{name} is a coroutine or a generator function, which fails only when it is "
            "awaited or iterated over: pass an ordinary function that does that"
        )
    retries: Callable[[str], Retries] | None = getattr(policy, "_retries", None)
    if retries is None:
        host = HostPolicy.of(cast("PolicyLike", policy))
        retries = partial(Retries, policy=host, report=_log, sleep=time.sleep)

    @functools.wraps(call)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        attempts = retries(name)
        while True:
            try:
                result = call(*args, **kwargs)
            except Exception as error:
                if not attempts.wait_after(error):
                    raise
            else:
                attempts.report_success()
                return result

    return again


def _log(attempt: CallAttempt) -> None:
    """Prints an attempt to the console, for a call outside of a run."""
    if attempt.fault is None:
        console.info(attempt.line)
    else:
        console.warning(attempt.line)


@dataclass
class Retries:
    """The attempts at one call, which is repeated after a transient failure in the network.

    The caller makes the call itself, and asks after each failure whether to call again.
    """

    name: str
    """What the call does, for the log."""
    policy: HostPolicy
    """Its rule for `network` and its `[retry]` apply."""
    report: Callable[[CallAttempt], object]
    """Reports each failure, and the success after failures."""
    sleep: Callable[[float], None]
    """Waits a number of seconds. Its exceptions end the call."""
    failed: int = field(default=0, init=False)
    """Number of failures since the last success."""
    last_text: str = field(default="", init=False)
    """Text of the last failure, which is not repeated in the log."""

    def wait_after(self, error: BaseException) -> bool:
        """Reports a failed attempt, and waits if there is another attempt.

        Args:
            error: the exception of the attempt.

        Returns:
            Whether to call again. False for an exception that is not a failure in the network,
            which is not reported.
        """
        fault = classify(error)
        if fault.cause is not Cause.NETWORK:
            return False
        self.failed += 1
        wait_s = self._wait_s(fault)
        then = "gives up"
        if wait_s is not None:
            then = f"next attempt in {wait_s:.1f} s"
        text = f"{type(error).__name__}: {error}"[:300]
        shown = text
        if text == self.last_text:  # the text of an HTTP client may have several lines
            shown = "the same error"
        self.last_text = text
        line = f"{self.name} failed ({fault.sign}, attempt {self.failed}), {then}: {shown}"
        self.report(CallAttempt(line, self.failed, fault, wait_s))
        if wait_s is None:
            return False
        self.sleep(wait_s)
        return True

    def _wait_s(self, fault: Fault) -> float | None:
        """Seconds until the next attempt, or None if the last attempt has failed."""
        rules = self.policy.retry
        attempts = 1
        if "retry" in self.policy.answers(Cause.NETWORK):
            attempts = rules.attempts
        asked = fault.retry_after_s or 0.0
        if not fault.transient or asked > _MAX_SERVER_WAIT_S or self.failed >= attempts:
            return None
        delay = _delay(rules, self.failed) * (1 - rules.jitter * _random())
        # A longer wait that the server asks for has priority, even beyond `max_delay_s`.
        return max(delay, asked)

    def report_success(self) -> None:
        """Reports a success, if failures came before it."""
        if self.failed:
            number = self.failed + 1
            self.report(CallAttempt(f"{self.name} has succeeded at attempt {number}", number))
        self.failed = 0
        self.last_text = ""


def _delay(rules: Retry, failed: int) -> float:
    """Seconds to wait after a number of failures, before the random part is subtracted."""
    try:
        return min(rules.base_delay_s * rules.factor ** (failed - 1), rules.max_delay_s)
    except OverflowError:
        return rules.max_delay_s
