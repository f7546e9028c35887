"""Reads run folders into typed values and frames. A damaged file raises no error; it is listed with the run."""
