"""The parts that an engine builds for its model: building them, rebuilding them, moving them off the device."""
