"""Network calls are repeated: which ones, how often, after which waits."""

from __future__ import annotations

import logging
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

import healcore
from healcore.policy import load
from healcore.runtime.faults import retry
from healcore.runtime.faults.retry import Retries, repeated
from healcore.runtime.host_policy import HostPolicy
from tests.runtime.faults.local_server import by_httpx, by_requests, serving


def recorded(call: Any, **rules: Any) -> Any:
    """The repeated call, with its `waits` and `attempts`; nothing waits for real."""
    defaults = {"jitter": 0.0, "base_delay_s": 1.0, "factor": 2.0, "max_delay_s": 5.0}
    policy = HostPolicy.of(load("default", retry={**defaults, "attempts": 5, **rules}))
    found = SimpleNamespace(waits=[], attempts=[])
    report, sleep = found.attempts.append, found.waits.append
    found.call = repeated(call, partial(Retries, policy=policy, report=report, sleep=sleep))
    return found


def by_hub(url: str) -> str:
    huggingface_hub.HfApi(endpoint=url).whoami(token="x")
    return "done"


@pytest.mark.parametrize("client", [by_requests, by_httpx, by_hub])
def test_the_failed_call_is_made_again_until_it_succeeds_or_gives_up(client):
    run = recorded(client)
    with serving(503, 0, 429, 200) as server:
        assert run.call(server.url) == "done"
    assert server.requests == 4
    assert run.waits == [1, 2, 4]
    assert [(each.number, each.wait_s) for each in run.attempts] == [
        (1, 1), (2, 2), (3, 4), (4, None),
    ]  # fmt: skip
    assert run.attempts[0].fault.sign == "HTTP 503"
    assert run.attempts[-1].fault is None

    run = recorded(client)
    with serving(503) as server, pytest.raises(Exception, match="503") as caught:
        run.call(server.url)
    assert server.requests == 5
    assert run.waits == [1, 2, 4, 5]
    assert type(caught.value).__module__.startswith(("requests", "httpx", "huggingface_hub"))
    assert "gives up" in run.attempts[-1].line


def test_how_long_a_server_may_ask_to_wait():
    run = recorded(by_requests)
    with serving(429, 200, headers={"Retry-After": "42"}) as server:
        run.call(server.url)
    day = {"Retry-After": "86400"}
    with serving(429, headers=day) as server, pytest.raises(requests.HTTPError):
        run.call(server.url)
    assert (server.requests, run.waits) == (1, [42])


@given(st.floats(1e-3, 1e3), st.floats(1, 1e4), st.floats(1, 1e6))
def test_waits_grow_by_the_factor_up_to_the_limit(base, more, factor):
    def fail():
        raise ConnectionResetError

    run = recorded(fail, base_delay_s=base, max_delay_s=base * more, factor=factor, attempts=6)
    with pytest.raises(ConnectionResetError):
        run.call()
    assert run.waits == pytest.approx([min(base * factor**n, base * more) for n in range(5)])


def test_without_a_healer(monkeypatch, caplog):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(retry, "_random", lambda: 0.0)
    policy = load("default", retry={"attempts": 3, "jitter": 0.0, "base_delay_s": 0.5})
    with serving(503, 503, 200, 404) as server, caplog.at_level(logging.INFO, "healcore"):
        get = healcore.retrying(by_requests, policy)
        assert get(server.url) == "done"
        with pytest.raises(requests.HTTPError, match="404"):
            get(server.url)
    assert (server.requests, waits) == (4, [0.5, 1])
    lines = [each.getMessage() for each in caplog.records][:3]
    assert lines[0].startswith("by_requests failed (HTTP 503, attempt 1), again in 0.5 s: HTTPErr")
    assert lines[-1] == "by_requests has succeeded at attempt 3"


@pytest.mark.parametrize("policy", ["observe", "zclip"])
def test_a_policy_that_does_not_repeat(policy):
    with serving(503) as server, pytest.raises(requests.HTTPError):
        healcore.retrying(by_requests, policy)(server.url)
    assert server.requests == 1
