"""What the workloads of a kind have in common: their data, their options, and how batches come to the device."""
