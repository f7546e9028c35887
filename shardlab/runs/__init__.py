"""The folder of a run: its files, the records in them, and the state that follows from them."""
