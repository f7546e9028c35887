"""`collect watch`: a live page about the runs of a workspace, for a browser on this machine."""
