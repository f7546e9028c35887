"""Which strategy to choose, as far as what was measured allows it: cells of the same work, ranked by each criterion."""
