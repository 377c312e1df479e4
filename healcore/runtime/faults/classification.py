"""`classify`: what kind of trouble an exception is, by its type and the codes in it.

    the type              builtins.MemoryError, httpx.TransportError, ...          _NAMES
    a code                HTTP status, errno, the status codes of XLA and NCCL     _NAMES, _MESSAGES
    its cause             the same for the exception that caused it                _chain_of

The first line that knows the exception decides. Types are named, not imported, because healcore
imports neither a framework nor an HTTP client. A message is read only for types with a code at a
fixed place in it. Prose is never searched.
"""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from healcore.core.decision import Cause
from healcore.runtime.faults.failures import FAILURES


class Fault(NamedTuple):
    """The classification of an exception: what kind of trouble it is, and how that is known.

        fault = healcore.classify(ConnectionResetError())
        fault.cause.name, fault.transient  # ('NETWORK', True)
        print(fault.advice)

    A tuple with the attributes below, which `classify` returns.
    """

    cause: Cause
    """OOM, DATA, WORKER, NETWORK, HANG or UNKNOWN."""
    sign: str
    """The evidence: a type, an HTTP status, an errno or a status code."""
    transient: bool = False
    """Whether the same call may succeed if it is repeated; True only for NETWORK."""
    retry_after_s: float | None = None
    """Seconds that the server asks to wait, or None if it names no time."""

    @property
    def advice(self) -> str:
        """What a person should check."""
        return FAILURES[self.cause].diagnosis


_MAX_CHAIN = 100  # exceptions to read; a library that retries can chain thousands

# Bugs in an error handler. The error that was being handled is not their cause.
_BUGS = (NameError, AttributeError, TypeError, SyntaxError, ImportError, AssertionError)

# The kinds of faults, to which `classify` adds the sign.
_OOM = Fault(Cause.OOM, "")
_DATA = Fault(Cause.DATA, "")
_HANG = Fault(Cause.HANG, "")
_WORKER = Fault(Cause.WORKER, "DataLoader worker")
_TRANSIENT = Fault(Cause.NETWORK, "", transient=True)
_PERMANENT = Fault(Cause.NETWORK, "")

_NAMES = (
    # NumPy's error derives from MemoryError.
    (_OOM, "builtins.MemoryError torch.OutOfMemoryError ENOMEM"),
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
    (_TRANSIENT, "ECONNRESET ECONNREFUSED ECONNABORTED ETIMEDOUT"),
    (_TRANSIENT, "ENETDOWN ENETUNREACH ENETRESET EHOSTDOWN EHOSTUNREACH"),
    (_DATA, "healcore.DataError builtins.EOFError EIO ESTALE EBADMSG"),
    (_DATA, "builtins.UnicodeDecodeError json.decoder.JSONDecodeError zlib.error"),
    (_DATA, "gzip.BadGzipFile lzma.LZMAError _lzma.LZMAError zipfile.BadZipFile"),
    (_DATA, "tarfile.ReadError PIL.UnidentifiedImageError pyarrow.lib.ArrowInvalid"),
    (_DATA, "datasets.exceptions.DatasetsError"),
)
_KINDS = {name: kind for kind, names in _NAMES for name in names.split()}
"""Type with its module, or name of an errno -> kind. The nearest known base class decides."""

_MESSAGES = (
    # Libraries and older versions raise the message of torch.OutOfMemoryError in a RuntimeError.
    (
        r"\[enforce fail at \S*alloc_cpu\.cpp:\d+\].*\bError code 12\b"
        r"|(CUDA|HIP)( driver)? error: out of memory|(CUDA|HIP|XPU|MPS backend) out of memory"
        r"|Triton Error \[(CUDA|HIP)\]: out of memory"
        r"|(CUDA|HIP) error: (CU|HIP)BLAS_STATUS_ALLOC_FAILED"
        r"|cuDNN error: CUDNN_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED: "
        # A CPU allocation that failed after the call had returned (JAX 0.10).
        r"|INTERNAL: (Error dispatching computation: )+Out of memory allocating",
        "out of memory",
        _OOM,
    ),
    (r"DEADLINE_EXCEEDED: ", "XLA DEADLINE_EXCEEDED", _HANG),
    (r"\[\S*gloo/\S+:\d+\] Timed out waiting \d+ms for \w+ operation", "gloo timeout", _HANG),
    (r"(wait|Wait) timeout after \d+ms", "store timeout", _HANG),
    (r"\[[^\]]*\] Watchdog caught collective operation timeout: ", "NCCL timeout", _HANG),
    (r"UNAVAILABLE: ", "XLA UNAVAILABLE", _PERMANENT),  # another process of the run is gone
    (r"(?s:.*\n)?nccl(Remote|System)Error: ", "NCCL error", _PERMANENT),  # begins a line
    (r"DATA_LOSS: ", "XLA DATA_LOSS", _DATA),
    (r"DataLoader timed out after \d+(\.\d+)? seconds", "DataLoader timeout", _DATA),
    (r"DataLoader worker \(pid.*\) (is killed|exited)", _WORKER.sign, _WORKER),
)
"""Beginning of the message of a RuntimeError of torch or XLA, sign, kind."""

_IN_WORKER = re.compile(r"Caught \w+ in .+\.\nOriginal Traceback \(most recent call last\):\n")
"""Beginning of the message of an exception that a DataLoader has passed on from a worker."""
_RAISED = re.compile(r"^  .*\n([\w.]+)(?:: (.*))?$", re.MULTILINE)
"""An exception in a printed traceback: the first line after the indented lines of the frames."""
_STATUS = re.compile(
    r"HTTP Error (\d{3}):|(\d{3}) (?:Server|Client) Error|(?:Server|Client) error '(\d{3}) "
    r"|(\d{3}), message="
)
"""Beginning of the messages of urllib, requests (and huggingface_hub), httpx and aiohttp."""


def classify(error: BaseException) -> Fault:
    """Classifies an exception: what kind of trouble it is, and whether a repeated call may help.

        try:
            train_step(batch)
        except Exception as error:
            fault = healcore.classify(error)
            print(fault.cause, fault.advice)

    The type decides first, then codes: HTTP status, errno, the status codes of XLA, and torch's
    fixed beginnings of a message. If these say nothing, the exception that caused it is classified.

    Args:
        error: any exception.

    Returns:
        The fault. Its cause is `Cause.UNKNOWN` for an exception that healcore does not know.

    Examples:
        >>> classify(ConnectionResetError()).transient
        True
        >>> classify(MemoryError()).cause.name
        'OOM'
    """
    for exception in _chain_of(error):
        try:
            fault = _coded_fault(exception)
        except Exception:  # attributes and text run code of the error's library
            continue
        if fault is not None:
            return fault
    return Fault(Cause.UNKNOWN, _names(type(error))[0].removeprefix("builtins."))


def _chain_of(error: BaseException) -> Iterator[Exception]:
    """An exception, the exception that caused it, and so on; without KeyboardInterrupt."""
    current: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if not isinstance(current, Exception):
            break
        yield current
        # urllib and urllib3 keep the socket's error in `reason`.
        cause = current.__cause__ or getattr(current, "reason", None)
        if not isinstance(cause, BaseException):
            cause = None
            if not (current.__suppress_context__ or isinstance(current, _BUGS)):
                cause = current.__context__
        current = cause


def _coded_fault(error: BaseException) -> Fault | None:
    """The fault by the type of the exception and by codes, or None."""
    if isinstance(error, OSError | EOFError):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__") == "multiprocessing.resource_sharer":
                return _WORKER  # it passed its tensors
    known = _http_fault(error) or _known_fault(_names(type(error)), str(error))
    return known or _fault_in_worker(error)


def _http_fault(error: Any) -> Fault | None:
    """The fault of an exception with an HTTP error status, or None.

    Clients store the status in different places: requests, httpx and huggingface_hub (and SDKs
    based on them) in `response.status_code`, urllib in `code`, aiohttp in `status`.
    """
    response = getattr(error, "response", None)
    status, headers = getattr(response, "status_code", None), getattr(response, "headers", None)
    if status is None:  # an integer `code` alone is no HTTP status: SystemExit has one
        headers = getattr(error, "headers", None)
        if hasattr(headers, "get"):
            status = getattr(error, "status", None) or getattr(error, "code", None)
    if isinstance(status, int):
        return _status_fault(int(status), headers)
    return None


def _status_fault(status: int, headers: Any = None) -> Fault | None:
    """The fault of an HTTP status, or None if the status is no error."""
    if not 400 <= status <= 599:
        return None
    transient = status in (408, 425, 429) or (status >= 500 and status not in (501, 505))
    if transient and headers:
        text = str(headers.get("Retry-After")).strip()
    else:
        text = ""
    # RFC 9110; the other form is a date.
    if re.fullmatch(r"\d{1,9}", text, re.ASCII):
        wait_s = float(text)
    else:
        wait_s = None
    return Fault(Cause.NETWORK, f"HTTP {status}", transient, wait_s)


def _known_fault(names: Sequence[str], text: str) -> Fault | None:
    """The fault by the nearest known base class, or None.

    Args:
        names: the class and its bases, nearest first.
        text: the message.
    """
    number = re.match(r"\[Errno (\d{1,4})\]", text)
    if number:
        code = errno.errorcode.get(int(number[1]), "")
    else:
        code = ""
    for name in names:
        if name in _KINDS:
            return _KINDS[name]._replace(sign=name.removeprefix("builtins."))
        if name == "builtins.OSError" and code in _KINDS:
            return _KINDS[code]._replace(sign=f"errno {code}")
        for pattern, sign, kind in _MESSAGES if name == "builtins.RuntimeError" else ():
            if re.match(pattern, text[:2000]):
                return kind._replace(sign=sign)
    return None


def _fault_in_worker(error: BaseException) -> Fault | None:
    """The fault of an exception in a DataLoader's worker, by its printed traceback, or None.

    torch raises an exception of the same type with the worker's traceback as its text. The status
    of a server, the errno and the exception that caused it are in this text only. A permanent
    failure in the network, such as a dead link, concerns one row only. So it stays unknown, and the
    row counts as unreadable.
    """
    if error.args:
        text = str(error.args[0])
    else:
        text = ""
    if not _IN_WORKER.match(text):
        return None
    for name, message in reversed(_RAISED.findall(text)):
        status = _STATUS.match(message)
        if status is not None and re.search("HTTP|ClientResponse", name):
            fault = _status_fault(int("".join(filter(None, status.groups()))))
        else:
            module, _, qualified = name.rpartition(".")
            cls = getattr(sys.modules.get(module or "builtins"), qualified, None)
            fault = _known_fault(_names(cls) if isinstance(cls, type) else [name], message)
        if fault is not None:
            if fault.cause is Cause.NETWORK and not fault.transient:
                return None
            return fault
        if name in [each.__name__ for each in _BUGS]:
            break
    return None


def _names(cls: type) -> list[str]:
    """Names of a class and of its bases with their modules, as in the tables, nearest first."""
    return [f"{each.__module__}.{each.__qualname__}" for each in cls.__mro__]
