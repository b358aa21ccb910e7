"""The memory and files that the plan allocates, and the ways of values in and out."""
