"""Data, faults and claims of the demo; `healcore.torch.demo` and `healcore.jax.demo` train."""
