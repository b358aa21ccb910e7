"""What an engine says of its run."""
