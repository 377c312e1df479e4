"""The demo: a run that really fails, and the same run healed, in torch and in JAX.

What happens to a run is here, free of any framework: the text, the faults, the record, the verdict.
The models and training loops are in `healcore.torch.demo` and `healcore.jax.demo`; they are the
shortest complete examples of healcore in a loop.
"""
