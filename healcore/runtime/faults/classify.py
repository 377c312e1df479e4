"""Classifies an exception by its type, by codes in it, then by the exception that caused it.

Types are named, not imported, because healcore imports neither a framework nor an HTTP client. A
message is read only for types with a code at a fixed place in it. Prose is never searched.
"""

from __future__ import annotations

import errno
import re
import traceback
from typing import Any

from healcore.core.verdict import Cause
from healcore.runtime.faults.failures import Fault

_MAX_CHAIN = 100  # exceptions to read; a library that retries can chain thousands

# Bugs in an error handler. The error that was being handled is not their cause.
_BUGS = (NameError, AttributeError, TypeError, SyntaxError, ImportError, AssertionError)

_OOM, _DATA, _HANG = Fault(Cause.OOM, ""), Fault(Cause.DATA, ""), Fault(Cause.HANG, "")
_WORKER = Fault(Cause.WORKER, "")
_TRANSIENT, _PERMANENT = Fault(Cause.NETWORK, "", transient=True), Fault(Cause.NETWORK, "")

_TYPES: dict[str, Fault] = {
    name: kind
    for kind, names in (
        # NumPy's error derives from MemoryError.
        (_OOM, "builtins.MemoryError torch.OutOfMemoryError"),
        # A peer has ended, so a repeated call of this rank alone cannot succeed.
        (_PERMANENT, "torch.distributed.DistNetworkError"),
        (_PERMANENT, "ssl.SSLCertVerificationError requests.exceptions.InvalidJSONError"),
        (_PERMANENT, "aiohttp.client_exceptions.ClientConnectorCertificateError"),
        (_PERMANENT, "huggingface_hub.errors.OfflineModeIsEnabled"),
        # huggingface_hub 2 has httpx2.
        (_PERMANENT, "httpx.UnsupportedProtocol httpx2.UnsupportedProtocol"),
        (_PERMANENT, "httpx.LocalProtocolError httpx2.LocalProtocolError"),
        (_TRANSIENT, "httpx.TransportError httpx2.TransportError"),
        # Sockets, asyncio and concurrent.futures raise this TimeoutError too.
        (_TRANSIENT, "builtins.ConnectionError builtins.TimeoutError socket.gaierror"),
        (_TRANSIENT, "ssl.SSLError http.client.IncompleteRead http.client.BadStatusLine"),
        (_TRANSIENT, "requests.exceptions.ConnectionError requests.exceptions.Timeout"),
        (_TRANSIENT, "requests.exceptions.ChunkedEncodingError urllib3.exceptions.TimeoutError"),
        (_TRANSIENT, "urllib3.exceptions.ProtocolError urllib3.exceptions.NewConnectionError"),
        (_TRANSIENT, "urllib3.exceptions.SSLError"),
        (_TRANSIENT, "aiohttp.client_exceptions.ClientConnectionError"),
        (_TRANSIENT, "aiohttp.client_exceptions.ClientPayloadError"),
        (_DATA, "healcore.runtime.data.position.DataError builtins.EOFError"),
        (_DATA, "builtins.UnicodeDecodeError json.decoder.JSONDecodeError zlib.error"),
        (_DATA, "gzip.BadGzipFile lzma.LZMAError _lzma.LZMAError zipfile.BadZipFile"),
        (_DATA, "tarfile.ReadError PIL.UnidentifiedImageError pyarrow.lib.ArrowInvalid"),
        (_DATA, "datasets.exceptions.DatasetsError"),
    )
    for name in names.split()
}
_ERRNO: dict[int, Fault] = {
    getattr(errno, name): kind
    for kind, names in (
        (_OOM, "ENOMEM"),
        (_DATA, "EIO ESTALE EBADMSG"),
        (_TRANSIENT, "ECONNRESET ECONNREFUSED ECONNABORTED ETIMEDOUT"),
        (_TRANSIENT, "ENETDOWN ENETUNREACH ENETRESET EHOSTDOWN EHOSTUNREACH"),
    )
    for name in names.split()
}

_XLA = (
    # A CPU allocation that failed after the call had returned (JAX 0.10).
    (
        r"INTERNAL: (Error dispatching computation: )+Out of memory allocating",
        "out of memory",
        _OOM,
    ),
    (r"RESOURCE_EXHAUSTED: ", "XLA RESOURCE_EXHAUSTED", _OOM),
    (r"DEADLINE_EXCEEDED: ", "XLA DEADLINE_EXCEEDED", _HANG),
    (r"UNAVAILABLE: ", "XLA UNAVAILABLE", _PERMANENT),  # another process of the run is gone
    (r"DATA_LOSS: ", "XLA DATA_LOSS", _DATA),
)
"""absl status codes, with which the message of an XLA error begins."""

_TORCH = (
    (r"\[enforce fail at \S*alloc_cpu\.cpp:\d+\].*\bError code 12\b", "ENOMEM", _OOM),
    (r"(CUDA|HIP) error: out of memory", "cudaErrorMemoryAllocation", _OOM),
    (r"Triton Error \[(CUDA|HIP)\]: out of memory", "Triton out of memory", _OOM),
    (r"(CUDA|HIP) error: (CU|HIP)BLAS_STATUS_ALLOC_FAILED", "ALLOC_FAILED", _OOM),
    (r"cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", _OOM),
    (r"MPS backend out of memory", "MPS backend out of memory", _OOM),
    (r"\[\S*gloo/\S+:\d+\] Timed out waiting \d+ms for \w+ operation", "gloo timeout", _HANG),
    (r"(wait|Wait) timeout after \d+ms", "store timeout", _HANG),
    (r"\[[^\]]*\] Watchdog caught collective operation timeout: ", "NCCL timeout", _HANG),
    (r"DataLoader timed out after \d+(\.\d+)? seconds", "DataLoader timeout", _DATA),
    (r"DataLoader worker \(pid.*\) (is killed|exited)", "DataLoader worker", _WORKER),
)
"""Beginnings of messages of torch's plain RuntimeErrors."""

_NCCL = (
    (r"(?s:.*\n)?ncclRemoteError: ", "ncclRemoteError", _PERMANENT),
    (r"(?s:.*\n)?ncclSystemError: ", "ncclSystemError", _PERMANENT),
)
"""NCCL's names of an error, with which a line of the message begins."""

_MESSAGES: dict[str, tuple[tuple[str, str, Fault], ...]] = {
    "jax.errors.JaxRuntimeError": _XLA,
    "jaxlib._jax.XlaRuntimeError": _XLA,
    "torch.distributed.DistBackendError": _NCCL,
    "builtins.RuntimeError": _TORCH,
}
"""Type -> (beginning of a message, sign, kind)."""

_BROKEN = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Parts of messages of gloo and the operating system."""

_HTTP_TRANSIENT = frozenset({408, 425, 429})
_HTTP_PERMANENT = frozenset({501, 505})  # all other 5xx are transient


def classify(error: BaseException) -> Fault:
    """Classifies an exception.

    The type decides first, then codes: HTTP status, errno, the status codes of XLA, and torch's
    fixed beginnings of a message. If these say nothing, the exception that caused it is classified.

    Args:
        error: any exception.

    Returns:
        The fault. Its cause is `Cause.UNKNOWN` for an exception that healcore does not know.
    """
    at: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if not isinstance(at, Exception):
            break  # KeyboardInterrupt, SystemExit
        if fault := _own_fault(at):
            return fault
        at = _cause_of(at)
    return Fault(Cause.UNKNOWN, _name(type(error)).removeprefix("builtins."))


def _own_fault(error: BaseException) -> Fault | None:
    """The fault by the exception's own type and codes, or None."""
    try:
        if isinstance(error, OSError | EOFError) and _is_from_worker(error):
            return Fault(Cause.WORKER, "DataLoader worker")
        return _http_fault(error) or _known_fault(error)
    except Exception:  # attributes and text run code of the error's library
        return None


def _is_from_worker(error: BaseException) -> bool:
    """Whether a killed worker has broken the connection by which it passes its tensors."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(f.f_globals.get("__name__") == "multiprocessing.resource_sharer" for f in frames)


def _cause_of(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None:
        return error.__cause__
    reason = getattr(error, "reason", None)  # urllib and urllib3 keep the socket's error there
    if isinstance(reason, BaseException):
        return reason
    if error.__suppress_context__ or isinstance(error, _BUGS):
        return None
    return error.__context__


def _http_fault(error: BaseException) -> Fault | None:
    """The fault of an exception with an HTTP error status, or None.

    Clients store the status in different places: requests, httpx and huggingface_hub (and SDKs
    based on them) in `response.status_code`, urllib in `code`, aiohttp in `status`.
    """
    response = getattr(error, "response", None)
    status, headers = getattr(response, "status_code", None), getattr(response, "headers", None)
    if status is None:  # an integer `code` alone is no HTTP status: SystemExit has one
        headers = getattr(error, "headers", None)
        if headers is None or not hasattr(headers, "get"):
            return None
        status = getattr(error, "status", None) or getattr(error, "code", None)
    if isinstance(status, bool) or not isinstance(status, int) or not 400 <= status <= 599:
        return None
    transient = status in _HTTP_TRANSIENT or (status >= 500 and status not in _HTTP_PERMANENT)
    wait = _retry_after(headers) if transient else None
    return Fault(Cause.NETWORK, f"HTTP {int(status)}", transient, wait)


def _retry_after(headers: Any) -> float | None:
    """Seconds to wait by a number in `Retry-After` (RFC 9110)."""
    text = str(headers.get("Retry-After") or "").strip()
    return float(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else None


def _known_fault(error: BaseException) -> Fault | None:
    """The fault by the nearest known base class, or None."""
    for cls in type(error).__mro__:
        name = _name(cls)
        if (kind := _TYPES.get(name)) is not None:
            return kind._replace(sign=name.removeprefix("builtins."))
        if cls is OSError and (kind := _ERRNO.get(error.errno)) is not None:  # type: ignore[attr-defined]
            return kind._replace(sign=f"errno {errno.errorcode[error.errno]}")  # type: ignore[attr-defined]
        for pattern, sign, kind in _MESSAGES.get(name, ()):
            if re.match(pattern, str(error)[:2000]):
                return kind._replace(sign=sign)
    return None


def is_broken_connection(error: BaseException | None) -> bool:
    """Whether gloo raised the error because the connection to another rank is broken."""
    if not isinstance(error, RuntimeError | ValueError):  # a ValueError in JAX
        return False
    return any(text in str(error) for text in _BROKEN)


def _name(cls: type) -> str:
    """Name of a class with its module, as in the tables."""
    return f"{cls.__module__}.{cls.__qualname__}"
