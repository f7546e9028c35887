"""Computes which strategy to choose: ranks cells that do the same work by speed, memory and other measured criteria."""
