"""End to end: the installed daemon in a process of its own, real clients."""
