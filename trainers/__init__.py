"""The code that trains a run on its nodes and writes the records of the run. torch is imported only when a run needs it."""
