"""From a bare or managed machine to one that is ready to train, verified."""
