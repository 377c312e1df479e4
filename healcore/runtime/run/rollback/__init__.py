"""Decides what is done about trouble: one value for every cause, and one table.

    trouble          why the run goes back, and the tries so far
    envelope         what the run is held in
    remedy           the table: a pure function of both
    recovery         answers each step, asks the table, and has the answer carried out
    nonfinite        notices NaN and Inf in weights, saves and steps
    holding          learns the healthy ranges, and holds what has left them

`restore` carries out what is decided here.
"""
