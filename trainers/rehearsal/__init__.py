"""Rehearsal: one step of a cell in one process, without the hardware that the cell needs (docs/planner.md)."""
