"""What follows from the measured numbers of cells and runs, before any of it is written as text."""
