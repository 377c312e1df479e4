"""The demo: a run that fails, and the same run healed, in torch and in JAX.

The models and training loops are in `healcore.torch.demo` and `healcore.jax.demo`.
"""
