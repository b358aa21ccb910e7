"""Activations: the tensors that autograd saves, their place, and the random states for recomputation."""
