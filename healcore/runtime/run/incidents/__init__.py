"""What the host makes of the records of a step: incidents, events, lines and orders.

`IncidentMonitor.note_step` is the entry:

    monitor        fills the ledger, writes events, and makes orders
    judged_record  a record of a step with its incident
    alerts         which causes are alerted, and which alerts have a line
    alarms         the events and lines of alarms
    incident_log   the events of the beginning and the end of each incident
    rate_log       the multipliers of the learning rates, and a rate that does not go back
    bad_rows       notices NaN in each epoch, for a line
    program_clip   notices that a program clips its gradients
    metrics        counts and mean losses of the run
"""
