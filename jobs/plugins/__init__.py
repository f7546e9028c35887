"""The workloads and strategies of a workspace: found, described by a process, copied beside a run."""
