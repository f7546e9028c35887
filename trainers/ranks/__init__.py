"""The ranks of a run as processes: their rendezvous, the checks after it, and how they end."""
