"""State that the processes of one node share: numbers, gradients, initial values."""
