"""Operations, one per file. Each operation reads facts and returns the changes that a node needs, or why it needs no change."""
