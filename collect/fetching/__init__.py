"""Gets the run folders from the cluster: what is there, what is missing here, and the transfer."""
