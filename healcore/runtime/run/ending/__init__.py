"""The end of a run.

One file for each thing that is asked, decided or done:

    requests       signals and a stop file ask a run to end, and several ranks end together
    exits          the exceptions that end the program
    stopping       ends a run that cannot train on
    shutdown       the order of the end: saves, reports, closes the parts
    last_state     what the last save may hold
    end_report     the postmortem, the last event and the last line
    outcome        collects how a run has ended
    completeness   what is missing in a run whose loop has ended by itself
    judgement      whether such a run has trained
"""
