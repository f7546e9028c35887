"""What profiler traces say: read a block at a time, told in exact integers."""
