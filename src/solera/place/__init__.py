"""The place of a computation: torch's global state, devices, and what is particular to each kind."""
