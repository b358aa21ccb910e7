"""What users read and write of single parameters: weights, exact values, states, gradients."""
