"""Arrays whose parts lie on tiers: copies, two slots, and bytes that autograd saved."""
