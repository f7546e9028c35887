"""The plans by which models are divided: linear layers are split over tensor-parallel ranks, blocks into pipeline stages."""
