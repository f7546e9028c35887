"""The timeline of a run: the steps of all ranks, the telemetry of all hosts and the profiled events, all on one clock."""
