"""Reading and writing single parameters for users: weights, exact values, states, gradients."""
