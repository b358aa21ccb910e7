"""Which units are on the device: hooks, access trace, policy, fetches and evictions."""
