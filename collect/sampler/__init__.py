"""Telemetry of the machine it runs on, light enough to run beside a measurement."""
