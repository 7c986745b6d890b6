"""Steps that several methods share: what takes `fed` or `server`."""
