"""The demo's text, faults and claims; `healcore.torch.demo` and `healcore.jax.demo` train."""
