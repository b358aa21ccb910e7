"""When units are fetched and evicted: trace, policy, coordinator, hooks."""
