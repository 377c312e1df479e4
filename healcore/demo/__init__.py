"""The demo: a run that really fails, and the same run healed, in torch and in JAX.

The models and training loops are in `healcore.torch.demo` and `healcore.jax.demo`; they are the
shortest complete examples of healcore in a loop.
"""
