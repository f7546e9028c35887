"""From a matrix to rendered, submitted and tracked runs."""
