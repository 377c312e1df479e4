"""The parts of the adapters are found by name."""

from __future__ import annotations

import pytest

from healcore import adapter_registry


@pytest.mark.parametrize("capability", adapter_registry.PROVIDED)
def test_every_adapter_provides(capability):
    for framework in adapter_registry.PROVIDED[capability]:
        pytest.importorskip("flax" if framework == "jax" else framework)
        provided = adapter_registry.find(framework, capability)
        name = getattr(provided, "__module__", provided.__name__)
        assert name.startswith(f"healcore.{framework}")
