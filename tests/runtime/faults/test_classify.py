"""Real exceptions of real libraries are the fault that they are, and prose is never one."""

from __future__ import annotations

import asyncio
import errno
import gzip
import importlib.util
import io
import json
import socket
import urllib.request
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import huggingface_hub
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest
import requests
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import distributed
from torch._C._distributed_c10d import HashStore

from healcore import classify
from healcore.core.verdict import Cause
from tests.runtime.faults.local_server import by_httpx, by_requests, serving


def error_of(action, *arguments, **options) -> BaseException:
    """What a call raises."""
    try:
        action(*arguments, **options)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def chained(outer: BaseException, inner: BaseException) -> BaseException:
    """`outer`, raised from `inner`."""
    outer.__cause__ = inner
    return outer


def while_handling(inner: BaseException, outer: BaseException) -> BaseException:
    """`outer`, raised while `inner` was handled, without `from`."""
    outer.__context__ = inner
    return outer


# -- HTTP -----------------------------------------------------------------------------------------


def by_urllib(url):
    urllib.request.urlopen(url, timeout=5).close()


def by_models_of_hub(url):
    huggingface_hub.HfApi(endpoint=url).model_info("somebody/model")


def by_aiohttp(url):
    import aiohttp

    async def get():
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            response.raise_for_status()

    asyncio.run(get())


CLIENTS = [by_requests, by_httpx, by_urllib, by_models_of_hub]
if importlib.util.find_spec("aiohttp"):  # only other libraries bring it along
    CLIENTS.append(by_aiohttp)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("status", "transient"),
    [(400, False), (401, False), (403, False), (404, False), (429, True), (500, True),
     (501, False), (503, True)],
)  # fmt: skip
def test_a_status(client, status, transient):
    with serving(status) as server:
        fault = classify(error_of(client, server.url))
    assert fault == (Cause.NETWORK, f"HTTP {status}", transient, None)


@pytest.mark.parametrize("client", CLIENTS)
def test_nobody_listens_or_the_connection_is_lost(client):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    refused = classify(error_of(client, f"http://127.0.0.1:{port}"))
    with serving(0) as server:
        lost = classify(error_of(client, server.url))
    for fault in refused, lost:
        assert (fault.cause, fault.transient) == (Cause.NETWORK, True)


@pytest.mark.parametrize("client", [requests.get, httpx.get, urllib.request.urlopen])
def test_a_timeout(client):
    with serving(-1) as server:
        fault = classify(error_of(client, server.url, timeout=0.05))
    assert (fault.cause, fault.transient) == (Cause.NETWORK, True)


@pytest.mark.parametrize(
    ("client", "header", "seconds"),
    [(by_requests, "7", 7), (by_httpx, "120", 120), (by_urllib, "soon", None),
     (by_models_of_hub, "-3", None), (by_urllib, "7", 7), (by_models_of_hub, "7", 7)],
)  # fmt: skip
def test_how_long_the_server_asks_to_wait(client, header, seconds):
    with serving(429, headers={"Retry-After": header}) as server:
        assert classify(error_of(client, server.url)).retry_after_s == seconds


# -- memory, data, hangs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "allocate",
    [lambda: torch.empty(1 << 50), lambda: jnp.ones((1 << 44,)), lambda: np.ones(1 << 50)],
)
def test_memory_runs_out(allocate):
    assert classify(error_of(allocate)).cause is Cause.OOM


@pytest.mark.parametrize(
    "read",
    [
        lambda: Image.open(io.BytesIO(b"no image")),
        lambda: pyarrow.parquet.read_table(io.BytesIO(b"no parquet")),
        lambda: zlib.decompress(b"x"),
        lambda: gzip.decompress(b"xx"),
        lambda: zipfile.ZipFile(io.BytesIO(b"xx")),
        lambda: json.loads("{"),
        lambda: b"\xff".decode(),
    ],
)
def test_data_that_cannot_be_read(read):
    assert classify(error_of(read)).cause is Cause.DATA


TIMEOUT = """[PG ID 0 PG GUID 0(default_pg) Rank 0] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600001"""
REMOTE = """NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network \
error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting."""
OOM_MESSAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1.0 GB)"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        *((error, Cause.OOM) for error in OOM_MESSAGES),
        (OSError(errno.ESTALE, "x"), Cause.DATA),
        (distributed.DistBackendError(TIMEOUT), Cause.HANG),
        (distributed.DistBackendError(REMOTE), Cause.NETWORK),
        (distributed.DistNetworkError("The client socket has timed out"), Cause.NETWORK),
    ],
    ids=str,
)
def test_messages_of_systems_that_are_not_here(error, cause):
    """As the sources of torch write them."""
    fault = classify(error)
    assert (fault.cause, fault.transient) == (cause, False)


def test_a_rank_that_does_not_come():
    """Two ranks of gloo in two threads; the second one never sends."""
    store = HashStore()
    wait = timedelta(milliseconds=300)
    groups: dict[int, Any] = {}

    def join(rank: int) -> None:
        groups[rank] = distributed.ProcessGroupGloo(store, rank, 2, wait)

    with ThreadPoolExecutor() as threads:
        list(threads.map(join, range(2)))
    error = error_of(lambda: groups[0].recv([torch.zeros(1)], 1, 0).wait())
    assert classify(error) == (Cause.HANG, "gloo timeout", False, None)


# -- chains --------------------------------------------------------------------------------------


class Wrapped(Exception): ...


def test_an_error_that_is_raised_from_another_is_that_one():
    inner = ConnectionResetError(errno.ECONNRESET, "x")
    assert classify(chained(Wrapped("y"), inner)).transient
    assert classify(while_handling(inner, Wrapped("y"))).transient
    assert classify(chained(Wrapped("y"), chained(Wrapped("z"), MemoryError()))).cause is Cause.OOM


def test_a_bug_in_a_handler_is_a_bug():
    inner = ConnectionResetError(errno.ECONNRESET, "x")
    assert classify(while_handling(inner, NameError("y"))).cause is Cause.UNKNOWN
    suppressed = while_handling(inner, Wrapped("y"))
    suppressed.__suppress_context__ = True
    assert classify(suppressed).cause is Cause.UNKNOWN


# -- prose ----------------------------------------------------------------------------------------

WORDS = ["capital", "API", "rate limit", "429", "503", "timeout", "out of memory", "CUDA", "NCCL",
         "connection reset", "OOM", "RESOURCE_EXHAUSTED", "http", "errno 104", "data"]  # fmt: skip
PROSE = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=20)), max_size=8).map(" ".join)
TYPES = [ValueError, KeyError, IndexError, ZeroDivisionError, Exception, Wrapped, TypeError]


@given(PROSE, st.sampled_from(TYPES))
def test_prose_is_never_searched(text, kind):
    assert classify(kind(text)).cause is Cause.UNKNOWN


@given(st.integers(-1000, 1000))
def test_only_errors_of_http_are_transient_or_network(status):
    error: Any = Wrapped("x")
    error.response = requests.Response()
    error.response.status_code = status
    fault = classify(error)
    assert (fault.cause is Cause.NETWORK) == (400 <= status <= 599)
    for_a_while = {408, 425, 429, *range(500, 600)} - {501, 505}
    assert fault.transient == (status in for_a_while)
