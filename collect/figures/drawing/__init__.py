"""What several figures share: lines, stacked bars and curves."""
