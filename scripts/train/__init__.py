"""The data of the bundled checkpoint and of its draft head."""
