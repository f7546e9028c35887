"""The engines of the strategies on the menu. Each module has a function `build`, which makes the engine of a rank."""
