"""When units are fetched and released: trace, policy, coordinator, hooks."""
