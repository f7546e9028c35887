"""Reads profiler traces block by block and computes where the time of a step went, in exact integer nanoseconds."""
