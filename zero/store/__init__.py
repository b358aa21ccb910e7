"""The memory and files that the plan allocates; how values are stored and read."""
