"""What a rank of each strategy keeps and sends by theory, without torch. Engines and the planner of `jobs` ask it."""
