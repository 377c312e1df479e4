"""Why a run ended, for a person: the facts, the diagnosis, the file."""
