"""The measured error of rehearsals, which each answer names."""

ERROR_PCT: float | None = None
ERROR_FROM = ""
