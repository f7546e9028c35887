"""Each module of this package defines one figure of the report, or several figures of one subject.

The function `draw` of a figure turns a group, the cells of one workload, into a figure in plotly's JSON. It returns None if the
group has no data for the figure. `FIGURES` of collect/report/page.py says which figures the report has, and in which order.
Colours are CSS variables, which the page resolves for light and dark mode.
"""
