"""The strategies: how a model is distributed over ranks. Each file is a family and lists its variants in `VARIANTS`."""
