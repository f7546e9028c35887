"""Parameter servers: servers store the parameters; workers push gradients to them and pull parameters from them."""
