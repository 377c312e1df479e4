"""One of two processes that train together: ``python two_processes.py RANK PORT``."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def main(rank: int, port: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)

    from healcore.jax.driver import JaxDriver
    from tests.jax.driver.small_runs import POLICY, plain

    run = plain()
    mesh = jax.make_mesh((2,), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(
        lambda leaf: jax.make_array_from_process_local_data(everywhere, np.asarray(leaf)), run.state
    )
    driver = JaxDriver(state, POLICY)

    ranks = driver.ranks()
    assert (ranks.rank, ranks.world) == (rank, 2)
    items = ranks.gather({"rank": rank, "of different sizes": "x" * 1000 * rank})
    assert [each["rank"] for each in items] == [0, 1]
    assert len(items[1]["of different sizes"]) == 1000

    rows = NamedSharding(mesh, PartitionSpec("data"))

    def batch(number: float) -> jax.Array:
        local = np.full((4, 4), number + rank, np.float32)
        return jax.make_array_from_process_local_data(rows, local)

    def take(number: float) -> str:
        driver.update(run.step(driver.state, batch(number)))
        handle = driver.poll_step()
        assert handle is not None
        return repr(handle.read())

    store = driver.store(None, ())
    take(1.0)
    store.save(1, driver.items(), healing=driver.healing())
    records = take(2.0)
    restored = store.restore(1, driver.items())
    driver.replace(restored.state)
    driver.load_healing(restored.healing or {})
    compiled = run.compiled()
    assert take(2.0) == records
    assert run.compiled() == compiled
    assert ranks.gather(records) == [records, records]
    # One process's NaN is everybody's.
    assert "nan" in take(jnp.nan if rank else 1.0)
    driver.expect_change()
    driver.decline()
    take(1.0)
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
