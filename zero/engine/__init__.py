"""The engine that users call, for training and for inference, and the functions that make it."""
