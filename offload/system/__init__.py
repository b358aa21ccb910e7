"""Calls of Linux and of Python itself: descriptors, signals, processes, sockets, threads."""
