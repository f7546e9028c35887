"""Export formats. Each module writes the results of a matrix as tables, or as runs in the format of an experiment tracker."""
