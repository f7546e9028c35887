"""What strategies have in common whose ranks have only parts of a model: the mesh, a rank's part, and the pipeline's step."""
