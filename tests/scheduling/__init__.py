"""The pure core against literal times: no clock, no threads, no engine."""
