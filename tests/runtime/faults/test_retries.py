"""Calls that fail in the network are made again, after waits."""

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
from healcore.runtime.faults.retry import Retries, retrying
from healcore.runtime.run_options import HostPolicy
from tests.runtime.faults.local_server import by_httpx, by_requests, serving


def recorded(call: Any, **rules: Any) -> Any:
    """The repeated call, with its `waits` and `attempts`; nothing waits for real."""
    defaults = {"jitter": 0.0, "base_delay_s": 1.0, "factor": 2.0, "max_delay_s": 5.0}
    policy = HostPolicy.of(load("default", retry={**defaults, "attempts": 5, **rules}))
    found = SimpleNamespace(waits=[], attempts=[])
    report, sleep = found.attempts.append, found.waits.append
    retries = partial(Retries, policy=policy, report=report, sleep=sleep)
    healer: Any = SimpleNamespace(_retries=retries)
    found.call = retrying(call, healer)
    return found


def by_hub(url: str) -> str:
    huggingface_hub.HfApi(endpoint=url).whoami(token="x")
    return "done"


@pytest.mark.parametrize("client", [by_requests, by_httpx, by_hub])
def test_the_failed_call_is_made_again_until_it_succeeds_or_gives_up(client):
    # The fourth call succeeds.
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

    # No call succeeds.
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


def test_retrying_without_a_healer_waits_and_logs(monkeypatch, caplog):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    policy = load("default", retry={"attempts": 3, "jitter": 0.0, "base_delay_s": 0.5})
    with serving(503, 503, 200, 404) as server, caplog.at_level(logging.INFO, "healcore"):
        get = healcore.retrying(by_requests, policy)
        assert get(server.url) == "done"
        with pytest.raises(requests.HTTPError, match="404"):
            get(server.url)
    assert (server.requests, waits) == (4, [0.5, 1])
    with serving(503) as server, pytest.raises(requests.HTTPError, match="503"):
        healcore.retrying(by_requests, "observe")(server.url)
    assert server.requests == 1, "a policy that does not repeat"
    lines = [each.getMessage() for each in caplog.records][:3]
    assert lines[0].startswith("by_requests failed (HTTP 503, attempt 1), next attempt in 0.5 s:")
    assert lines[-1] == "by_requests has succeeded at attempt 3"
