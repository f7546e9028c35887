"""The matrix file: the keys of each part, and the cells and runs that follow from them."""
