"""The kinds of nodes that several providers use: this machine, a login node, and a node that a file describes."""
