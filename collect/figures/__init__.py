"""The figures of the report, one module each. `draw` of a module turns the cells of a group into a figure in plotly's JSON.

Colours are CSS variables, which the page resolves for light and dark mode.
"""
