"""Recognises exceptions by their type, their errno, or a code in their message.

Types are named, not imported, because healcore imports neither a framework nor an HTTP client. A
message is read only where the type says that it has a code in a fixed place; prose is never read.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from healcore.core.verdict import Cause
from healcore.runtime.faults.failures import Fault


class _Kind(NamedTuple):
    cause: Cause
    transient: bool = False


_OOM, _DATA, _HANG = _Kind(Cause.OOM), _Kind(Cause.DATA), _Kind(Cause.HANG)
_TRANSIENT, _PERMANENT = _Kind(Cause.NETWORK, transient=True), _Kind(Cause.NETWORK)

_CERTIFICATE = "ssl.SSLCertVerificationError"

_TYPES: dict[str, _Kind] = {
    "builtins.MemoryError": _OOM,  # NumPy's too
    "torch.OutOfMemoryError": _OOM,
    "torch.cuda.OutOfMemoryError": _OOM,  # before torch 2.5
    # A peer is gone: the call of this rank alone cannot succeed.
    "torch.distributed.DistNetworkError": _PERMANENT,
    # Python. TimeoutError is also that of sockets, asyncio and concurrent.futures.
    "builtins.ConnectionError": _TRANSIENT,
    "builtins.TimeoutError": _TRANSIENT,
    "socket.gaierror": _TRANSIENT,
    _CERTIFICATE: _PERMANENT,
    "ssl.SSLError": _TRANSIENT,
    "http.client.IncompleteRead": _TRANSIENT,
    "http.client.BadStatusLine": _TRANSIENT,
    "requests.exceptions.ConnectionError": _TRANSIENT,
    "requests.exceptions.Timeout": _TRANSIENT,
    "requests.exceptions.ChunkedEncodingError": _TRANSIENT,
    "requests.exceptions.InvalidJSONError": _PERMANENT,
    "urllib3.exceptions.TimeoutError": _TRANSIENT,
    "urllib3.exceptions.ProtocolError": _TRANSIENT,
    "urllib3.exceptions.NewConnectionError": _TRANSIENT,
    "urllib3.exceptions.SSLError": _TRANSIENT,
    "aiohttp.client_exceptions.ClientConnectorCertificateError": _PERMANENT,
    "aiohttp.client_exceptions.ClientConnectionError": _TRANSIENT,
    "aiohttp.client_exceptions.ClientPayloadError": _TRANSIENT,
    "huggingface_hub.errors.OfflineModeIsEnabled": _PERMANENT,
    # What reading data raises.
    "healcore.runtime.data.position.DataError": _DATA,
    "builtins.EOFError": _DATA,
    "builtins.UnicodeDecodeError": _DATA,
    "json.decoder.JSONDecodeError": _DATA,
    "zlib.error": _DATA,
    "gzip.BadGzipFile": _DATA,
    "lzma.LZMAError": _DATA,
    "_lzma.LZMAError": _DATA,
    "zipfile.BadZipFile": _DATA,
    "tarfile.ReadError": _DATA,
    "PIL.UnidentifiedImageError": _DATA,
    "pyarrow.lib.ArrowInvalid": _DATA,
    "datasets.exceptions.DatasetsError": _DATA,
}
_CLIENTS: set[str] = {
    "requests.exceptions.RequestException",
    "urllib.error.URLError",
    "urllib3.exceptions.HTTPError",
    "http.client.HTTPException",
    "aiohttp.client_exceptions.ClientError",
}
"""Bases of all errors of a client: by themselves wrong URLs, too many redirects, and so on."""

for _httpx in ("httpx", "httpx2"):  # huggingface_hub 2 has httpx2
    _TYPES |= {
        f"{_httpx}.UnsupportedProtocol": _PERMANENT,
        f"{_httpx}.LocalProtocolError": _PERMANENT,
        f"{_httpx}.TransportError": _TRANSIENT,
    }
    _CLIENTS |= {f"{_httpx}.HTTPError", f"{_httpx}.InvalidURL"}

_ERRNO: dict[int, _Kind] = {
    getattr(errno, name): kind
    for kind, names in (
        (_OOM, "ENOMEM"),
        (_DATA, "EIO ESTALE EBADMSG"),
        (_TRANSIENT, "ECONNRESET ECONNREFUSED ECONNABORTED ETIMEDOUT"),
        (_TRANSIENT, "ENETDOWN ENETUNREACH ENETRESET EHOSTDOWN EHOSTUNREACH"),
    )
    for name in names.split()
}

_XLA: dict[str, _Kind] = {
    "RESOURCE_EXHAUSTED": _OOM,
    "DEADLINE_EXCEEDED": _HANG,
    "UNAVAILABLE": _PERMANENT,  # another process of the run is gone
    "DATA_LOSS": _DATA,
}
"""absl status codes, with which the message of an XLA error begins."""

_XLA_ON_HOST = re.compile(r"INTERNAL: (Error dispatching computation: )+Out of memory allocating")
"""An allocation on a CPU that failed after the call had returned (JAX 0.10)."""

_GRPC_TRANSIENT = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED"})
"""Every other gRPC code is permanent: wrong credentials, wrong arguments."""

_TORCH: tuple[tuple[re.Pattern[str], str, _Kind], ...] = tuple(
    (re.compile(pattern), sign, kind)
    for pattern, sign, kind in (
        (r"\[enforce fail at \S*alloc_cpu\.cpp:\d+\].*\bError code 12\b", "ENOMEM", _OOM),
        (r"(CUDA|HIP) error: out of memory", "cudaErrorMemoryAllocation", _OOM),
        (r"(CUDA|HIP) error: (CU|HIP)BLAS_STATUS_ALLOC_FAILED", "ALLOC_FAILED", _OOM),
        (r"cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", _OOM),
        (r"MPS backend out of memory", "MPS backend out of memory", _OOM),
        (r"\[\S*gloo/\S+:\d+\] Timed out waiting \d+ms for \w+ operation", "gloo timeout", _HANG),
        (r"(wait|Wait) timeout after \d+ms", "store timeout", _HANG),
        (r"\[[^\]]*\] Watchdog caught collective operation timeout: ", "NCCL timeout", _HANG),
        (r"DataLoader timed out after \d+(\.\d+)? seconds", "DataLoader timeout", _DATA),
    )
)
"""Beginnings of the messages of torch's RuntimeErrors, which have no type of their own."""


_BROKEN = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What gloo and the system say then, in errors that nothing else distinguishes."""


def _torch(error: BaseException) -> Fault | None:
    text = str(error)[:2000]
    for pattern, sign, kind in _TORCH:
        if pattern.match(text):
            return _fault(kind, sign)
    return None


def _nccl(error: BaseException) -> Fault | None:
    """NCCL's own name of the error, at the beginning of a line of its message."""
    code = re.search(r"^nccl(Remote|System)Error: ", str(error)[:2000], re.MULTILINE)
    return None if code is None else _fault(_PERMANENT, f"nccl{code[1]}Error")


def _xla(error: BaseException) -> Fault | None:
    if _XLA_ON_HOST.match(str(error)[:1000]):
        return _fault(_OOM, "XLA out of memory")
    code = re.match(r"([A-Z_]+): ", str(error)[:100])
    kind = _XLA.get(code[1]) if code else None
    return None if code is None or kind is None else _fault(kind, f"XLA {code[1]}")


def _grpc(error: Any) -> Fault:
    name = str(getattr(error.code(), "name", "UNKNOWN"))
    return _fault(_TRANSIENT if name in _GRPC_TRANSIENT else _PERMANENT, f"gRPC {name}")


def _errno(error: Any) -> Fault | None:
    kind = _ERRNO.get(error.errno)
    return None if kind is None else _fault(kind, f"errno {errno.errorcode[error.errno]}")


_BY_CODE: dict[str, Callable[[Any], Fault | None]] = {
    "jax.errors.JaxRuntimeError": _xla,
    "jaxlib.xla_extension.XlaRuntimeError": _xla,  # JAX before 0.6
    "jaxlib._jax.XlaRuntimeError": _xla,
    "torch.distributed.DistBackendError": _nccl,
    "builtins.RuntimeError": _torch,
    "grpc.RpcError": _grpc,
    "builtins.OSError": _errno,
}


def fault_of(error: BaseException) -> Fault | None:
    """The fault of this error alone, by the nearest of its base classes that is known."""
    for cls in type(error).__mro__:
        name = name_of(cls)
        if (kind := _TYPES.get(name)) is not None:
            return _fault(kind, name.removeprefix("builtins."))
        by_code = _BY_CODE.get(name)
        if by_code is not None and (found := by_code(error)) is not None:
            return found
    return None


def client_fault_of(error: BaseException) -> Fault | None:
    """The fault of an error of a network client about which nothing else is known."""
    name = next((name for name in map(name_of, type(error).__mro__) if name in _CLIENTS), None)
    return None if name is None else Fault(Cause.NETWORK, name)


def is_broken_connection(error: BaseException | None) -> bool:
    """Whether gloo has raised this because the connection to another rank has broken."""
    if not isinstance(error, RuntimeError | ValueError):  # a ValueError in JAX
        return False
    return any(each in str(error) for each in _BROKEN)


def is_certificate(error: BaseException) -> bool:
    """Whether the server's certificate was refused, which does not pass."""
    return any(name_of(cls) == _CERTIFICATE for cls in type(error).__mro__)


def name_of(cls: type) -> str:
    """The class's name with its module, as in the tables."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _fault(kind: _Kind, sign: str) -> Fault:
    return Fault(kind.cause, sign, kind.transient)
