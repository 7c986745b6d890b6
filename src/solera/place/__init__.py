"""Where things are computed: torch's global state, devices, and what is particular to each kind."""
