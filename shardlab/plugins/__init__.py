"""What a workload or strategy in a workspace's own Python file is, and how such a file is executed."""
