"""The kinds of plug-ins in a workspace's own Python files, how such a file is executed, and the process that executes it."""
