"""The trainers run on the nodes: they train one run and write its records. torch is imported only when a run needs it."""
