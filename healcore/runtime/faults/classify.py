"""Classifies an exception: by its type, by the codes in it, then by what it was raised from."""

from __future__ import annotations

from healcore.core.verdict import Cause
from healcore.runtime.faults import http_status, known_errors
from healcore.runtime.faults.failures import Fault

_MOST = 100
"""Exceptions of one error that are looked at; a library that retries can chain thousands."""

_BUGS = (NameError, AttributeError, TypeError, SyntaxError, ImportError, AssertionError)
"""Raised while another error is handled they are errors of the handler, not that error renamed."""

_WORST_FIRST = (Cause.OOM, Cause.HANG, Cause.DATA, Cause.UNKNOWN, Cause.NETWORK)
"""Of several errors at once the first of these decides: a transient one only if all are."""


def classify(error: BaseException) -> Fault:
    """Which fault an exception is.

    The type decides first, then codes: HTTP status, errno, the status codes of XLA and gRPC, and
    torch's fixed beginnings of a message. If they say nothing, the error that it was raised from
    is looked at. Of an ExceptionGroup the worst member decides. Prose is never searched.

    Args:
        error: any exception.

    Returns:
        The fault; `Cause.UNKNOWN`, with the type's name as the sign, if nothing is known.
    """
    return _classify(error, set()) or _unknown(error)


def _classify(error: BaseException, seen: set[int]) -> Fault | None:
    """The fault, or None if nothing is known. `seen`: ids of the errors that were looked at."""
    found = fallback = None
    certificate = False
    at: BaseException | None = error
    while at is not None and id(at) not in seen and len(seen) < _MOST:
        if not isinstance(at, Exception | BaseExceptionGroup):
            break  # KeyboardInterrupt, SystemExit
        seen.add(id(at))
        certificate = certificate or known_errors.is_certificate(at)
        if found is None:
            found = _worst(at, seen) if isinstance(at, BaseExceptionGroup) else _own_fault(at)
            fallback = fallback or known_errors.client_fault_of(at)
        at = _raised_from(at)
    found = found or fallback
    if found is not None and found.transient and certificate:
        # Clients report it as an ordinary failure to connect.
        return Fault(Cause.NETWORK, "ssl.SSLCertVerificationError")
    return found


def _own_fault(error: BaseException) -> Fault | None:
    """The fault by what the error itself says."""
    try:
        return http_status.fault_of(error) or known_errors.fault_of(error)
    except Exception:  # its attributes and its text run the code of its library
        return None


def _worst(group: BaseExceptionGroup[BaseException], seen: set[int]) -> Fault | None:
    members = [_classify(member, seen) or _unknown(member) for member in group.exceptions]
    return min(members, key=lambda fault: (_WORST_FIRST.index(fault.cause), fault.transient))


def _unknown(error: BaseException) -> Fault:
    return Fault(Cause.UNKNOWN, known_errors.name_of(type(error)).removeprefix("builtins."))


def _raised_from(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None:
        return error.__cause__
    reason = getattr(error, "reason", None)  # urllib and urllib3 keep the socket's error there
    if isinstance(reason, BaseException):
        return reason
    if error.__suppress_context__ or isinstance(error, _BUGS):
        return None
    return error.__context__
