"""A Healer whose block is never left frees its resources once nothing refers to it."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from healcore import Checkpoints
from healcore.runtime.healer import Healer
from healcore.runtime.store import StoreInUse
from tests.healer.run_directory import events
from tests.healer.training_loops import loop_of, rules, train

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])


def enter(loop: Any, folder: Path) -> Healer:
    """As in a notebook that enters by hand and whose next cell fails."""
    healer = Healer(rules(), state=loop.state, store=folder, checkpoints=Checkpoints(every=5))
    healer.__enter__()
    for number in healer.batches(range(12)):
        loop.step(healer, number)
        loop.state = healer.state
        if number == 7:
            break
    healer.store.wait()
    return healer


@BOTH
def test_the_same_loop_goes_on_in_a_new_one(framework, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    loop = loop_of(framework, policy=rules())
    healer = enter(loop, tmp_path)
    run = weakref.ref(healer.run)
    gc.collect()
    assert run() is not None
    del healer  # and no gc.collect(): the new one sees to that
    assert train(loop, rules(), range(12), store=tmp_path)["step"] == 12
    assert run() is None
    assert signal.getsignal(signal.SIGTERM) is before
    assert events(tmp_path, "resume")[0]["checkpoint"] == 5


@BOTH
def test_a_healer_that_is_still_referenced_blocks_the_next(framework, tmp_path):
    healer = enter(loop_of(framework, policy=rules()), tmp_path)
    with pytest.raises(StoreInUse, match="this process: leave the `with` block"):
        train(loop_of(framework, policy=rules()), rules(), range(12), store=tmp_path)
    healer.__exit__(None, None, None)
    facts = train(loop_of(framework, policy=rules()), rules(), range(12), store=tmp_path)
    assert facts["step"] == 12


def test_a_signal_after_it_was_cleared_in_another_thread_is_not_swallowed(tmp_path):
    """Python sets handlers in the main thread only; the garbage collector may run in any."""
    called = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        healers = [enter(loop_of("torch"), tmp_path)]

        def forget() -> None:
            healers.clear()
            gc.collect()

        thread = threading.Thread(target=forget)
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGTERM)
        assert called == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
