"""Communication between the ranks of one engine: weights, gradients, and agreements at the start."""
