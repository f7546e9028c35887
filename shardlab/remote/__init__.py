"""Other machines over SSH: commands, conversations and files, and the workspace that belongs to ours there."""
