"""The plan: the tier and the size of all memory, decided before anything is allocated."""
