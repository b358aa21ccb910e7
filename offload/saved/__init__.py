"""Tensors that autograd has saved, kept elsewhere until backward needs them."""
