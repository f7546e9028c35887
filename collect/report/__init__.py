"""The text and the layout of a report: its HTML page, its output in a terminal, and the tables of the exports."""
