"""The parts that workloads of a kind share: data, options, and the copy of batches to the device."""
