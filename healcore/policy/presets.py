"""The policies that come with healcore, one TOML file each in `healcore.policies`."""

from __future__ import annotations

from importlib import resources

_SUFFIX = ".toml"


def preset_names() -> tuple[str, ...]:
    """Names of the presets, "default" first."""
    names = (entry.name for entry in resources.files("healcore.policies").iterdir())
    found = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
    return tuple(sorted(found, key=lambda name: (name != "default", name)))


def preset_text(name: str) -> str:
    """The file of a preset, comments and all.

    Args:
        name: One of `preset_names()`.

    Raises:
        KeyError: There is no such preset.
    """
    if name not in preset_names():
        raise KeyError(name)
    file = resources.files("healcore.policies").joinpath(name + _SUFFIX)
    return file.read_text(encoding="utf-8")
