"""Adapters' plugins are found by name; the error names what is missing."""

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


def test_an_unknown_framework_lists_the_known_ones():
    with pytest.raises(adapter_registry.NotProvided, match="one of torch, jax, got 'tensorflow'"):
        adapter_registry.find("tensorflow", "driver")


def test_an_error_about_a_missing_plugin_lists_the_available_ones():
    pytest.importorskip("torch")
    with pytest.raises(adapter_registry.NotProvided, match=r"'optimizer'; it provides: .*driver"):
        adapter_registry.find("torch", "optimizer")
