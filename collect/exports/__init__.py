"""What a matrix came to -> files of one format: tables, or runs in a tracker's own store."""
