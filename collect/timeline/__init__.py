"""One run on one clock: the steps of all ranks, the telemetry of all hosts and profiled events."""
