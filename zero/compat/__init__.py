"""The names of other libraries for functions of this one."""
