"""The framework adapters. Nothing imports this: they install as healcore.jax and healcore.torch.

The file is needed all the same: without it, tools that walk the tree (pytest, pyright, mypy) take
the folder adapters/jax for the package `jax`, and adapters/torch for `torch`.
"""
