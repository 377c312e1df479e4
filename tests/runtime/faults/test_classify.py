"""Real exceptions of real libraries are the fault that they are."""

import asyncio
import errno
import gzip
import importlib.util
import io
import itertools
import json
import urllib.request
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import huggingface_hub
import jax
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
from torch._utils import ExceptionWrapper

from healcore import classify
from healcore.core.decision import Cause
from tests.runtime.faults.local_server import by_httpx, by_requests, serving


def error_of(action, *arguments, **options) -> BaseException:
    """The error that a call raises."""
    try:
        action(*arguments, **options)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


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


CLOSES, LATE = 0, -1  # see `serving`


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", [404, 429, 503, CLOSES])
def test_http_statuses_are_network_faults_and_some_are_transient(client, status):
    """For other statuses see `test_only_errors_of_http_are_transient_or_network`."""
    with serving(status) as server:
        fault = classify(error_of(client, server.url))
    assert (fault.cause, fault.transient) == (Cause.NETWORK, status != 404)
    assert fault.sign == f"HTTP {status}" or status == CLOSES
    fault = classify(error_of(client, server.url))  # the server is gone
    assert (fault.cause, fault.transient) == (Cause.NETWORK, True)


def passed_on(call, *args):
    """Raises the exception of a call as a DataLoader does in the main process."""
    try:
        call(*args)
    except Exception:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 0")
    wrapper.reraise()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", [404, 429, 503, CLOSES])
def test_a_transient_failure_in_a_worker_is_one_too(client, status):
    """Torch keeps type and traceback only. A dead link (404) is an unreadable row."""
    with serving(status) as server:
        fault = classify(error_of(passed_on, client, server.url))
    if status == 404:
        assert fault.cause is Cause.UNKNOWN
        return
    assert (fault.cause, fault.transient) == (Cause.NETWORK, True)
    assert fault.sign == f"HTTP {status}" or status == CLOSES
    fault = classify(error_of(passed_on, client, server.url))  # the server is gone
    assert (fault.cause, fault.transient) == (Cause.NETWORK, True)


def row_of_a_library(url):
    try:
        by_urllib(url)
    except Exception as error:
        raise ValueError("row 3") from error


def raises_errno(number):
    raise OSError(number, "a message")


def bug_in_a_handler(url):
    try:
        by_urllib(url)
    except Exception:
        raise TypeError("a bug")  # noqa: B904


def test_what_caused_an_exception_in_a_worker():
    with serving(503) as server:
        fault = classify(error_of(passed_on, row_of_a_library, server.url))
        bug = classify(error_of(passed_on, bug_in_a_handler, server.url))
    assert (fault.cause, fault.sign) == (Cause.NETWORK, "HTTP 503")
    assert bug.cause is Cause.UNKNOWN
    for number, cause in ((errno.ENETUNREACH, Cause.NETWORK), (errno.EIO, Cause.DATA)):
        assert classify(error_of(passed_on, raises_errno, number)).cause is cause
    quoted = KeyError(
        "Caught X in Y.\nOriginal Traceback (most recent call last):\nConnectionError"
    )
    assert classify(quoted).cause is Cause.UNKNOWN


@pytest.mark.parametrize("client", [requests.get, httpx.get, urllib.request.urlopen])
def test_a_timeout_is_a_transient_network_fault(client):
    with serving(LATE) as server:
        fault = classify(error_of(client, server.url, timeout=0.05))
    assert (fault.cause, fault.transient) == (Cause.NETWORK, True)


@pytest.mark.parametrize(
    ("client", "header", "seconds"),
    [
        pytest.param(by_requests, "7", 7, id="requests"),
        pytest.param(by_httpx, "120", 120, id="httpx"),
        pytest.param(by_urllib, "soon", None, id="urllib, no number"),
        pytest.param(by_models_of_hub, "-3", None, id="hub, below 0"),
        pytest.param(by_urllib, "7", 7, id="urllib"),
        pytest.param(by_models_of_hub, "7", 7, id="hub"),
    ],
)
def test_how_long_the_server_asks_to_wait(client, header, seconds):
    with serving(429, headers={"Retry-After": header}) as server:
        assert classify(error_of(client, server.url)).retry_after_s == seconds


@pytest.mark.parametrize(
    "allocate",
    [lambda: torch.empty(1 << 50), lambda: jnp.ones((1 << 44,)), lambda: np.ones(1 << 50)],
)
def test_an_allocation_that_fails_is_out_of_memory(allocate):
    assert classify(error_of(allocate)).cause is Cause.OOM


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda: Image.open(io.BytesIO(b"no image")), id="image"),
        pytest.param(lambda: pyarrow.parquet.read_table(io.BytesIO(b"no parquet")), id="parquet"),
        pytest.param(lambda: zlib.decompress(b"x"), id="zlib"),
        pytest.param(lambda: gzip.decompress(b"xx"), id="gzip"),
        pytest.param(lambda: zipfile.ZipFile(io.BytesIO(b"xx")), id="zip"),
        pytest.param(lambda: json.loads("{"), id="json"),
        pytest.param(lambda: b"\xff".decode(), id="text"),
    ],
)
def test_data_that_cannot_be_read(read):
    assert classify(error_of(read)).cause is Cause.DATA


def raises(error: Exception, cause: BaseException | None = None) -> None:
    raise error from cause


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        pytest.param(
            lambda: raises(ValueError("model size 7 is unknown, not one of 13, 70")),
            Cause.UNKNOWN,
            id="another size in words",
        ),
        pytest.param(lambda: [1, 2][5], Cause.UNKNOWN, id="list index"),
        pytest.param(
            lambda: torch.ones(2, requires_grad=True).numpy(),
            Cause.UNKNOWN,
            id="a tensor with a gradient as NumPy",
        ),
        pytest.param(
            lambda: torch.ones(2).backward(), Cause.UNKNOWN, id="backward without a gradient"
        ),
        pytest.param(
            lambda: jax.jit(lambda x: 1 if x else 2)(1.0), Cause.UNKNOWN, id="a branch in jit"
        ),
        # The error of the network is the cause, whatever the text of the outer error.
        pytest.param(
            lambda: raises(RuntimeError("got size 10 of 20"), ConnectionError()),
            Cause.NETWORK,
            id="an error of the network is the cause",
        ),
    ],
)
def test_errors_of_a_program_are_unknown(call, cause):
    assert classify(error_of(call)).cause is cause


TIMEOUT = """[PG ID 0 PG GUID 0(default_pg) Rank 0] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600001"""


REMOTE = """NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network \
error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting."""


OOM_MESSAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"),
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


class Wrapped(Exception): ...


def chain(*errors: BaseException, link: str = "__cause__") -> BaseException:
    """The first error, raised from the second one (or while it was handled), and so on."""
    for outer, inner in itertools.pairwise(errors):
        setattr(outer, link, inner)
    return errors[0]


def test_an_error_is_the_one_from_which_it_was_raised_but_a_bug_in_a_handler_is_a_bug():
    lost = ConnectionResetError(errno.ECONNRESET, "x")
    assert classify(chain(Wrapped("y"), lost)).transient
    assert classify(chain(Wrapped("y"), Wrapped("z"), MemoryError())).cause is Cause.OOM
    handled = chain(Wrapped("y"), lost, link="__context__")
    assert classify(handled).transient
    handled.__suppress_context__ = True
    assert classify(handled).cause is Cause.UNKNOWN
    assert classify(chain(NameError("y"), lost, link="__context__")).cause is Cause.UNKNOWN


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
