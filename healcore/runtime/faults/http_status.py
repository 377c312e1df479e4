"""Reads HTTP errors of any client: the status, whether it passes, how long to wait."""

from __future__ import annotations

import re
import time
from email.utils import parsedate_to_datetime
from typing import Any

from healcore.core.verdict import Cause
from healcore.runtime.faults.failures import Fault

_TRANSIENT = frozenset({408, 425, 429})
_PERMANENT = frozenset({501, 505})
"""Statuses 5xx that a server never recovers from; it recovers from the others."""

# draft-ietf-httpapi-ratelimit-headers, as the Hugging Face Hub sends it: "api";r=0;t=55
_RATELIMIT = re.compile(r"r=(?P<left>\d{1,9})\s*;\s*t=(?P<seconds>\d{1,9})")


def fault_of(error: BaseException) -> Fault | None:
    """The fault of an error with an HTTP status; None if it has none that is an error.

    Clients keep the status in different places: requests, httpx and huggingface_hub (and the SDKs
    above them) in `response.status_code`, urllib in `code`, aiohttp in `status`.
    """
    response = getattr(error, "response", None)
    status, headers = getattr(response, "status_code", None), getattr(response, "headers", None)
    if status is None:  # an integer `code` or `status` alone is no HTTP status: SystemExit has one
        headers = getattr(error, "headers", None)
        if headers is None or not hasattr(headers, "get"):
            return None
        status = getattr(error, "status", None) or getattr(error, "code", None)
    if isinstance(status, bool) or not isinstance(status, int) or not 400 <= status <= 599:
        return None
    transient = status in _TRANSIENT or (status >= 500 and status not in _PERMANENT)
    wait = _retry_after(headers) if transient else None
    return Fault(Cause.NETWORK, f"HTTP {int(status)}", transient, wait)


def _retry_after(headers: Any) -> float | None:
    """Seconds by `Retry-After` (a number or a date, RFC 9110), else by an exhausted `RateLimit`."""
    text = str(headers.get("Retry-After") or "").strip()
    if re.fullmatch(r"\d{1,9}", text, re.ASCII):
        return float(text)
    if text:
        try:
            return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
        except (ValueError, TypeError, OverflowError):
            return None
    limit = _RATELIMIT.search(str(headers.get("RateLimit") or ""))
    return float(limit["seconds"]) if limit and limit["left"] == "0" else None
