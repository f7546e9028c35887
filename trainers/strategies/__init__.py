"""The strategies on the menu: how a model is distributed over ranks. Each file has one family, with variants in `VARIANTS`."""
