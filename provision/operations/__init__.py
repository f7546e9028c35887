"""Operations, one per file: each reads facts and returns the changes that a node needs, or why it needs none."""
