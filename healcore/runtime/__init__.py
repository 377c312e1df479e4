"""The host side of a run, without a framework: stores, ledger, events, the Healer."""
