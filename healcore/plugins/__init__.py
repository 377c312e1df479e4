"""Defines what the tools need of an adapter, one protocol per need.

The runtime's protocols are in `runtime/driver.py` and `runtime/json_codec.py`; adapters
register what they have in `healcore/adapter_registry.py`.
"""
