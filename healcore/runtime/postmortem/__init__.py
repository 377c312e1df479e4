"""The postmortem of a run: a file with its diagnosis and the facts about its end."""
