"""Turns step records, telemetry samples and memory records of runs into polars frames or plain objects."""
