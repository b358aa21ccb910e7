"""Swap space and the I/O engine: how bytes get to disks and back, and what a disk can do."""
