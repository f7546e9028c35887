"""The instruments: measurements of a run while it trains."""
