"""CloudLab: the hardware catalogue, requests for experiments, a client of the portal, and cluster files of experiments."""
