"""What the ranks of one engine exchange."""
