"""Load generator, simulator and tuner: what measures and adjusts the daemon."""
