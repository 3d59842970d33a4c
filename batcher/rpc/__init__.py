"""The wire: messages, codec, status table, services and transports."""
