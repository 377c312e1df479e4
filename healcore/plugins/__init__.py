"""Defines what the tools need of an adapter, one protocol per need.

The protocols of the runtime's needs are in `runtime/driver.py` and `runtime/plain.py`; adapters
register what they have in `healcore/adapter_registry.py`.
"""
