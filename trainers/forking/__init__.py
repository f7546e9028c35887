"""Rehearsals that start in a second: ranks are forked from one warm parent, which has already imported torch and the models."""
