"""Asynchronous input and output: backends, swap files, stripes, and the thread that moves bytes."""
