"""`collect watch`: a web page about the runs of a workspace that updates itself, for a browser on this machine."""
