"""The parts shared by strategies whose ranks hold parts of a model: the mesh, the model part of a rank, the pipeline's step."""
