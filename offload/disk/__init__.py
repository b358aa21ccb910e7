"""Swap space and the I/O engine: how bytes get to disks and back, and how fast a disk is."""
