"""What goes where and how much of it: decided before anything is allocated."""
