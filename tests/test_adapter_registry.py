"""Adapters' plugins are found by name."""

from __future__ import annotations

import pytest

from healcore import adapter_registry


@pytest.mark.parametrize("framework", adapter_registry.FRAMEWORKS)
@pytest.mark.parametrize("capability", ["driver", "plain_values", "demo_training"])
def test_every_adapter_provides(framework, capability):
    pytest.importorskip("flax" if framework == "jax" else framework)
    provided = adapter_registry.find(framework, capability)
    assert provided.__name__.startswith(f"healcore.{framework}") or provided.__module__.startswith(
        f"healcore.{framework}"
    )
    assert adapter_registry.find(framework, capability) is provided
