"""From the records of all nodes to tables, figures and a report."""
