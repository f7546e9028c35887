"""What strategies have in common whose ranks hold parts of a model: the mesh, what a rank holds, the pipeline's step."""
