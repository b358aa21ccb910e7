"""Gradients, clipping and the optimizer's sub-group pipeline."""
