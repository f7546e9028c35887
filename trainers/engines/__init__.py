"""The engines: what the menu entries of strategies build. Each module has a function `build`."""
