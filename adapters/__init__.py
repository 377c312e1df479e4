"""Framework adapters, which install as `healcore.jax` and `healcore.torch`.

No code imports this file. Without it, tools that walk the tree (pytest, pyright, mypy) would
mistake adapters/jax for the package `jax`, and adapters/torch for `torch`.
"""
