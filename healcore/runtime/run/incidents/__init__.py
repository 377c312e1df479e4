"""What the host makes of the records of a step: incidents, events, lines and orders.

`IncidentMonitor.note_step` is the entry:

    monitor        fills journal and ledger, writes events, and makes orders
    alarms         the events and lines of alarms, alerts and incidents
    rate_log       the learning rates in force, and the event of each change of a multiplier
    metrics        counts and mean losses of the run
"""
