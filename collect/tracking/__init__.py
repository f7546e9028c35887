"""Logs a run to an experiment tracker while the run goes on."""
