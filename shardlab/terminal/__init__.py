"""How the commands start, and what they show on a terminal."""
