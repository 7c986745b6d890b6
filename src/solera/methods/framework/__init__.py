"""FedEED's generalised framework: its loop, the three slots, and how clients are grouped."""
