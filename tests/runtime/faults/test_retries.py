"""Calls that fail in the network are made again, after waits."""

import logging
import time
from typing import Any

import huggingface_hub
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import healcore
from healcore.policy import load
from healcore.runtime.faults.retry import retrying
from tests.runtime.faults.local_server import by_httpx, by_requests, serving


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The waits of the test, which do not happen."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def repeated(call: Any, **rules: Any) -> Any:
    defaults = {"jitter": 0.0, "base_delay_s": 1.0, "factor": 2.0, "max_delay_s": 5.0}
    return retrying(call, load("default", retry={**defaults, "attempts": 5, **rules}))


def by_hub(url: str) -> str:
    huggingface_hub.HfApi(endpoint=url).whoami(token="x")
    return "done"


@pytest.mark.parametrize("client", [by_requests, by_httpx, by_hub])
def test_the_failed_call_is_made_again_until_it_succeeds_or_gives_up(client, waits, caplog):
    with serving(503, 0, 429, 200) as server:  # the fourth call succeeds
        assert repeated(client)(server.url) == "done"
    assert server.requests == 4
    assert waits == [1, 2, 4]

    waits.clear()
    with serving(503) as server, pytest.raises(Exception, match="503") as caught:
        repeated(client)(server.url)
    assert server.requests == 5
    assert waits == [1, 2, 4, 5]
    assert type(caught.value).__module__.startswith(("requests", "httpx", "huggingface_hub"))
    assert "(HTTP 503, attempt 5), gives up" in caplog.records[-1].getMessage()


def test_how_long_a_server_may_ask_to_wait(waits):
    get = repeated(by_requests)
    with serving(429, 200, headers={"Retry-After": "42"}) as server:
        get(server.url)
    day = {"Retry-After": "86400"}
    with serving(429, headers=day) as server, pytest.raises(requests.HTTPError):
        get(server.url)
    assert (server.requests, waits) == (1, [42])


@given(st.floats(1e-3, 1e3), st.floats(1, 1e4), st.floats(1, 1e6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_waits_grow_by_the_factor_up_to_the_limit(waits, base, more, factor):
    def fail():
        raise ConnectionResetError

    waits.clear()
    call = repeated(fail, base_delay_s=base, max_delay_s=base * more, factor=factor, attempts=6)
    with pytest.raises(ConnectionResetError):
        call()
    assert waits == pytest.approx([min(base * factor**n, base * more) for n in range(5)])


def test_retrying_without_a_healer_waits_and_logs(waits, caplog):
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
    lines = [each.getMessage() for each in caplog.records]
    assert lines[0].startswith("by_requests failed (HTTP 503, attempt 1), next attempt in 0.5 s:")
    assert "attempt 2" in lines[1]
