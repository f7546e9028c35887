"""Where runs wait for their turn: one file a scheduler."""
