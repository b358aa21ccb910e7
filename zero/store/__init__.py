"""Everything that the plan allocates, and how values get into it and out of it."""
