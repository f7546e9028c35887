"""Logs a run to an experiment tracker, such as MLflow, while the run is still going on."""
