"""The text and the layout of a report: the HTML page, the output in the terminal, and the tables of the exports."""
