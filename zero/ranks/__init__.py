"""Communication of ranks: their discovery, the agreed order of their collectives, and how a wait ends."""
