"""The state of each run by its records and its scheduler, and how much of its budget of retries is left."""
