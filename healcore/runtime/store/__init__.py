"""Verified checkpoints: the store and the parts that all frameworks share.

The stores come from the adapters: `healcore.torch.store`, `healcore.jax.store`.
"""
