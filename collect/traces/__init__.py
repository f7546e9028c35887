"""Reads traces of torch's profiler (Kineto) block by block and computes where the time of a step went, in exact nanoseconds."""
