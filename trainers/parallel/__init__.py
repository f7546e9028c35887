"""Code for strategies whose ranks have only parts of a model: the mesh, the part of a rank, and the step of a pipeline."""
