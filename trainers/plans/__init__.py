"""How a workload's model is cut: its linear layers over tensor-parallel ranks, its blocks over a pipeline's stages."""
