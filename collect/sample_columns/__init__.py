"""Samples of telemetry as columns: the file that a sampler writes beside its records, so that a long run is loaded quickly."""
