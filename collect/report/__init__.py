"""All text and layout of the report: the page, the terminal, and the tables of the exports."""
