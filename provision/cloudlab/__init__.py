"""CloudLab: its hardware, what is requested from it, its portal, and the cluster file of an experiment."""
