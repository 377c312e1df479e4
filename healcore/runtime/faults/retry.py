"""Repeats calls that fail in the network: a user's call, a read of a batch, a part of it."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from random import SystemRandom
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from healcore import console
from healcore.core.decision import Cause
from healcore.policy import PolicyLike
from healcore.runtime.faults.classification import Fault, classify
from healcore.runtime.run_options import HostPolicy

if TYPE_CHECKING:
    from healcore.runtime.healer import Healer
    from healcore.runtime.run.run import Run

P = ParamSpec("P")
T = TypeVar("T")

_MAX_SERVER_WAIT_S = 3600.0  # a call is not repeated if a server asks for a longer wait
_random = SystemRandom().random  # from 0 to 1, without changing the run's random state


def retrying(call: Callable[P, T], policy: PolicyLike | Healer[Any] = "default") -> Callable[P, T]:
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
    given: Any = policy
    is_healer = hasattr(type(given), "_live")
    if is_healer:
        host = None
    else:
        host = HostPolicy.of(given)

    @functools.wraps(call)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        if is_healer:
            run: Any = given._live
        else:
            run = None
        attempts = Retries(name, host or run.policy, run)
        while True:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                if not attempts.wait_after(error):
                    raise

    return again


class Retries:
    """The attempts at one call, which is repeated after a transient failure in the network.

    The caller makes the call itself, and asks after each failure whether to call again.

    Args:
        name: what the call does, for the log.
        policy: its rule for `network` and its `[retry]` apply.
        run: the run that logs each attempt, and whose signals end a wait; None outside of a run.

    Attributes:
        failed: number of failures since the last success, which the caller sets to 0.
    """

    def __init__(self, name: str, policy: HostPolicy, run: Run | None = None) -> None:
        self._name = name
        self._policy = policy
        self._run = run
        self.failed = 0

    def wait_after(self, error: BaseException) -> bool:
        """Reports a failed attempt, and waits if there is another attempt.

        Args:
            error: the exception of the attempt.

        Returns:
            Whether to call again. False for an exception that is not a failure in the network,
            which is not reported.
        """
        fault, run = classify(error), self._run
        if fault.cause is not Cause.NETWORK:
            return False
        self.failed += 1
        wait_s = self._wait_s(fault)
        if wait_s is None:
            then = "gives up"
        else:
            then = f"next attempt in {wait_s:.1f} s"
        line = (
            f"{self._name} failed ({fault.sign}, attempt {self.failed}), {then}: "
            f"{type(error).__name__}: {error!s:.300}"
        )
        if wait_s is None:
            answer = None
        else:
            answer = "retry"
        if run is not None:
            step = run.progress.step
            run.log.fault(step, fault, line, answer=answer, attempt=self.failed, wait_s=wait_s)
        else:
            console.warning(line)
        if wait_s is None:
            return False
        if run is None:
            time.sleep(wait_s)
        else:
            with run.hang_guard.excluding_wait():
                run.end_requests.sleep(wait_s)
        return True

    def _wait_s(self, fault: Fault) -> float | None:
        """Seconds until the next attempt, or None if the last attempt has failed."""
        rules = self._policy.retry
        asked = fault.retry_after_s or 0.0
        repeats = "retry" in self._policy.answers(Cause.NETWORK) and fault.transient
        if not repeats or asked > _MAX_SERVER_WAIT_S or self.failed >= rules.attempts:
            return None
        delay = rules.base_delay_s
        for _ in range(self.failed - 1):
            delay = min(delay * rules.factor, rules.max_delay_s)
        # A longer wait that the server asks for has priority, even beyond `max_delay_s`.
        return max(delay * (1 - rules.jitter * _random()), asked)
