"""The matrix files (*.yaml) that are shipped with the package. This package contains no code."""
