"""The engine users hold: training, inference, and how both are made."""
