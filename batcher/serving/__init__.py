"""The daemon's life: models, the event loop's driver, health, metrics, signals."""
