"""CloudLab: its hardware, what is requested from it, and the cluster file of an experiment."""
