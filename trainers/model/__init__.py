"""What is done to a model before it trains: precision, checkpointing of activations, initialization, optimizer."""
