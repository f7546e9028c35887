"""Facts about nodes, one per file: a command that runs on a node, and a pure function that parses its output."""
