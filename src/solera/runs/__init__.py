"""Run directories: their content, and how they are written, read and compared."""
