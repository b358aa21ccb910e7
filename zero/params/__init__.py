"""The model's parameters as units of one flat space: cover, layout, binding, initialisation."""
