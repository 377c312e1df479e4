"""Where healcore calls an adapter: the registry, and one protocol per need of the tools.

The protocols of the runtime's needs are in `runtime/driver.py` and `runtime/plain.py`.
"""
