"""The end of a run.

One file for each thing that is asked, decided or done:

    requests       signals and a stop file ask a run to end, and several ranks end together
    exits          the exceptions that end the program
    stopping       ends a run that cannot train on
    end            the order of the end: reads the last steps, saves, judges, reports, closes
    completeness   what is missing in a run whose loop has ended by itself, and has it trained
"""
