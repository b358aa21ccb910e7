"""Layers that this project brings: pipelines and mixtures of experts."""
