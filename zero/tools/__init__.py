"""What stands on top of the engine: the command line and its tools."""
