"""What is measured of a run while it trains, and how."""
