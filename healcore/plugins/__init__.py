"""Where healcore calls an adapter: the registry, and one protocol per need of the tools.

Adapters register in `adapters/<framework>/plugin.py`. The protocols of the runtime's needs are in
`runtime/driver.py` (driver) and `runtime/plain.py` (values of a data cursor).
"""
