"""What was seen: one step judged, the ledger of incidents, and the user's hooks."""
