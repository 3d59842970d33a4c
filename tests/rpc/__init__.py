"""The wire: validation, codec, header cache, status table, addresses, sockets."""
