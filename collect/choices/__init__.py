"""Computes from the measurements which strategy to choose: ranks the cells that do the same work, by speed, memory and more."""
