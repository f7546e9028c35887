"""How a workload's model is divided: linear layers are split over tensor-parallel ranks, blocks into pipeline stages."""
