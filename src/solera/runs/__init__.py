"""Run directories: what is in one, how it is written, read and compared."""
