"""Reports of an engine about its run."""
