"""What figures are drawn with: panels, lines, bars and legends, as plotly's JSON."""
