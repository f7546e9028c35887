"""A frame -> a figure as plotly's JSON, one file each; colours are names that the page resolves for light and dark."""
