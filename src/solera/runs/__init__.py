"""A run directory: writing it, reading it, comparing several."""
