"""What we are compared with. Each rival is optional: one that cannot run says why, and is reported as missing."""
