"""Reads the policies that come with healcore, one TOML file each in `healcore.policies`."""

from __future__ import annotations

from importlib import resources

PRESETS = ("default", "pretraining", "aggressive", "conservative", "observe", "zclip")
"""healcore's own policies. All others are recipes: published settings, written as policies."""

_SUFFIX = ".toml"


def preset_names() -> tuple[str, ...]:
    """Names of healcore's own policies, "default" first."""
    return PRESETS


def recipe_names() -> tuple[str, ...]:
    """Names of the published recipes that come with healcore, sorted."""
    names = (entry.name for entry in resources.files("healcore.policies").iterdir())
    found = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
    return tuple(sorted(name for name in found if name not in PRESETS))


def name_of(fingerprint: str | None) -> str | None:
    """The name of the preset or recipe with this fingerprint, or None."""
    from healcore.policy.loader import engine_of  # here: the loader reads the presets

    names = (*preset_names(), *recipe_names())
    return next((name for name in names if engine_of(name).fingerprint == fingerprint), None)


def preset_text(name: str) -> str:
    """The file of a preset or of a recipe, comments and all.

    Args:
        name: One of `preset_names()` or of `recipe_names()`.

    Raises:
        KeyError: There is no such policy.
    """
    if name not in (*preset_names(), *recipe_names()):
        raise KeyError(name)
    file = resources.files("healcore.policies").joinpath(name + _SUFFIX)
    return file.read_text(encoding="utf-8")
