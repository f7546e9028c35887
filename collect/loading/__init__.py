"""Run folders -> typed runs and frames; damage is listed, never raised."""
