"""Messages and rounds: what every other package builds on."""
