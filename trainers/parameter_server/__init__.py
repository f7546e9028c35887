"""Servers that hold the parameters, workers that push gradients to them and pull parameters back."""
