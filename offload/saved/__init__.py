"""What autograd has saved, kept elsewhere until backward asks for it."""
