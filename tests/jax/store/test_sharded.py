"""Arrays on several devices."""

from __future__ import annotations

from tests.runtime.store.programs import finish, start


def test_sharded_arrays_on_eight_devices(tmp_path):
    flags = "--xla_force_host_platform_device_count=8"
    module = "tests.jax.store.sharded_program"
    finish(start(module, tmp_path, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"))
