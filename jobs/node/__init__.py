"""What the supervisor looks at and starts on its node: processes, GPUs in use, the rendezvous, progress."""
