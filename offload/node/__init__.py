"""State that the processes of one node share: numbers, planes, gradients, initial values."""
