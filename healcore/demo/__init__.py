"""Data and faults of the demo; `healcore.torch.demo` and `healcore.jax.demo` train."""
