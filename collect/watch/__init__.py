"""Serves what runs do at the moment as a page for a browser on this machine."""
