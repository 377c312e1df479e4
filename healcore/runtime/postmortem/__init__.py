"""Why a run ended, for a person: the case, the diagnosis, the file."""
