"""Network calls are repeated: which ones, how often, after which waits."""

from __future__ import annotations

import logging
import time
from functools import partial

import huggingface_hub
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

import healcore
from healcore.policy import load
from healcore.runtime.faults import retry
from healcore.runtime.faults.retry import Attempt, Retries, repeated
from healcore.runtime.host_policy import HostPolicy
from tests.runtime.faults.local_server import by_httpx, by_requests, serving


def policy_of(**retry) -> HostPolicy:
    return HostPolicy.of(load("default", retry={"jitter": 0.0, **retry}))


class Record:
    """The waits and the attempts of a call; nothing waits for real."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.attempts: list[Attempt] = []

    def around(self, call):
        policy = policy_of(base_delay_s=1.0, factor=2.0, max_delay_s=5.0, attempts=5)
        report, sleep = self.attempts.append, self.waits.append
        return repeated(call, partial(Retries, policy=policy, report=report, sleep=sleep))


@pytest.fixture
def record():
    return Record()


def by_hub(url: str) -> str:
    huggingface_hub.HfApi(endpoint=url).whoami(token="x")
    return "done"


CLIENTS = [by_requests, by_httpx, by_hub]


@pytest.mark.parametrize("client", CLIENTS)
def test_the_failed_call_is_made_again_until_it_succeeds(record, client):
    with serving(503, 0, 429, 200) as server:
        assert record.around(client)(server.url) == "done"
    assert server.requests == 4
    assert record.waits == [1, 2, 4]
    assert [each.number for each in record.attempts] == [1, 2, 3, 4]
    assert [each.wait_s for each in record.attempts] == [1, 2, 4, None]
    assert record.attempts[0].fault.sign == "HTTP 503"
    assert record.attempts[-1].error is None


@pytest.mark.parametrize("client", CLIENTS)
def test_the_last_error_is_raised_as_it_is(record, client):
    with serving(503) as server, pytest.raises(Exception, match="503") as caught:
        record.around(client)(server.url)
    assert server.requests == 5
    assert record.waits == [1, 2, 4, 5]
    assert type(caught.value).__module__.startswith(("requests", "httpx", "huggingface_hub"))
    assert record.attempts[-1].error is caught.value
    assert "gives up" in str(record.attempts[-1])


def test_how_long_a_server_may_ask_to_wait(record):
    with serving(429, 200, headers={"Retry-After": "42"}) as server:
        record.around(by_requests)(server.url)
    assert record.waits == [42]
    day = {"Retry-After": "86400"}
    with serving(429, headers=day) as server, pytest.raises(requests.HTTPError):
        record.around(by_requests)(server.url)
    assert (server.requests, record.waits) == (1, [42])


@given(st.floats(1e-3, 1e3), st.floats(1, 1e4), st.floats(1, 1e6))
def test_waits_grow_by_the_factor_up_to_the_limit(base, more, factor):
    waits: list[float] = []
    policy = policy_of(base_delay_s=base, max_delay_s=base * more, factor=factor, attempts=6)

    def fail():
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        repeated(fail, partial(Retries, policy=policy, report=str, sleep=waits.append))()
    assert waits == pytest.approx([min(base * factor**n, base * more) for n in range(5)])


# -- the public function --------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch):
    """The waits of `healcore.retrying`, less no random part; nothing waits for real."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    monkeypatch.setattr(retry, "_random", lambda: 0.0)
    return found


def test_without_a_healer(waits, caplog):
    policy = load("default", retry={"attempts": 3, "jitter": 0.0, "base_delay_s": 0.5})
    with serving(503, 503, 200, 404) as server, caplog.at_level(logging.INFO, "healcore"):
        get = healcore.retrying(by_requests, policy)
        assert get(server.url) == "done"
        with pytest.raises(requests.HTTPError, match="404"):
            get(server.url)
    assert waits == [0.5, 1]
    assert server.requests == 4
    lines = [each.getMessage() for each in caplog.records][:3]
    assert lines[0].startswith("by_requests failed (HTTP 503, attempt 1), again in 0.5 s: HTTPErr")
    assert lines[-1] == "by_requests has succeeded at attempt 3"


@pytest.mark.parametrize("policy", ["observe", "zclip"])
def test_a_policy_that_does_not_repeat(policy):
    with serving(503) as server, pytest.raises(requests.HTTPError):
        healcore.retrying(by_requests, policy)(server.url)
    assert server.requests == 1
