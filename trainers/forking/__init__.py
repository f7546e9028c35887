"""A rehearsal in a second: ranks forked from one warm parent that has imported torch and the models already."""
