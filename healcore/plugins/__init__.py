"""Where healcore calls an adapter: the registry, and one protocol per need of the tools.

An adapter registers what it provides in `adapters/<framework>/plugin.py`. The driver and the values
of a data cursor are needed by the runtime; their protocols are `runtime/driver.py` and
`runtime/plain.py`.
"""
