"""The command `collect`: makes tables, figures, verdicts and a report from the records of all nodes."""
