"""Protocols of the capabilities that the tools use from an adapter.

The runtime's protocols are in `runtime/driver.py` and `runtime/json_codec.py`. Their
implementations are listed in `healcore/adapter_registry.py`.
"""
