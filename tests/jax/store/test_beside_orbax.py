"""An `OrbaxStore` beside the user's own Orbax manager, which saves at the same time."""

import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as v0
import pytest
from orbax.checkpoint import v1
from orbax.checkpoint._src.futures.future import AwaitableSignalsContract
from orbax.checkpoint._src.futures.synchronization import (
    HandlerAwaitableSignal,
    OperationIdGenerator,
)

from healcore.jax.store import OrbaxStore

SAVES = 12


def manager_of_v0(root: Path) -> tuple[Any, Any, Any]:
    """`save`, `restore` and `close` of the user's `CheckpointManager`."""
    options = v0.CheckpointManagerOptions(max_to_keep=3, enable_async_checkpointing=True)
    manager = v0.CheckpointManager(root, options=options)

    def restore(step: int, like: dict[str, Any]) -> Any:
        manager.wait_until_finished()
        return manager.restore(step, args=v0.args.StandardRestore(like))

    def save(step: int, state: Any) -> Any:
        return manager.save(step, args=v0.args.StandardSave(state))

    return save, restore, manager.close


def manager_of_v1(root: Path) -> tuple[Any, Any, Any]:
    """The same of the user's `Checkpointer` of the newer API."""
    latest: Any = v1.training.preservation_policies.LatestN(3)
    # The default leaves out a save while another is being written.
    always: Any = v1.training.save_decision_policies.FixedIntervalPolicy(1)
    manager = v1.training.Checkpointer(
        str(root), preservation_policy=latest, save_decision_policy=always
    )

    def restore(step: int, like: dict[str, Any]) -> Any:
        manager.wait()
        return manager.load_checkpointables(step, {"state": like})["state"]

    def save(step: int, state: Any) -> Any:
        return manager.save_checkpointables_async(step, {"state": state})

    return save, restore, manager.close


@pytest.mark.slow
@pytest.mark.parametrize("manager_of", [manager_of_v0, manager_of_v1])
def test_both_save_at_the_same_time(manager_of, tmp_path):
    store = OrbaxStore(tmp_path / "healing")
    save, restore, close = manager_of(tmp_path / "own")
    state = {f"w{i}": jnp.full((128, 128), float(i)) for i in range(6)}
    for step in range(SAVES):
        state = {name: value + 1 for name, value in state.items()}
        store.save(step, state)
        assert save(step, state)
        if step % 6 == 5:  # a rollback reads while the user's save is being written
            store.wait()
            assert store.restore(step, state).state["w1"][0, 0] == state["w1"][0, 0]
    own = restore(SAVES - 1, state)
    store.wait()
    restored = store.restore(SAVES - 1, state).state
    for name, value in state.items():
        np.testing.assert_array_equal(own[name], value)
        np.testing.assert_array_equal(restored[name], value)
    assert len(store.checkpoints()) == SAVES
    close()


def test_a_save_does_not_wait_for_the_directory_of_another_manager(tmp_path):
    """Orbax keeps the signals of a save by the number of the newest save of the process."""
    OperationIdGenerator.next_operation_id()
    signals = [HandlerAwaitableSignal.STEP_DIRECTORY_CREATION]
    AwaitableSignalsContract.add_to_awaitable_signals_contract(signals)
    store = OrbaxStore(tmp_path)
    try:
        store.save(1, {"w": jnp.ones(3)})
        waiting = threading.Thread(target=store.wait, daemon=True)
        waiting.start()
        waiting.join(30)
        assert not waiting.is_alive()
        assert AwaitableSignalsContract.get_awaitable_signals_from_contract() == signals
    finally:
        AwaitableSignalsContract.remove_all_awaitable_signals()
