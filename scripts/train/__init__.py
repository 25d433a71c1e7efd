"""The data of the bundled checkpoint."""
