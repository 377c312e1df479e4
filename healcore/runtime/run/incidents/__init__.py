"""What the host makes of the records of a step: incidents, events, lines and orders.

`IncidentMonitor.note_step` is the entry:

    monitor    fills journal and ledger, writes alarms, asks the hooks, and makes orders
    metrics    counts, mean losses and learning rates of the run
"""
