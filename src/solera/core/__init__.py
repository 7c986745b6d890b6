"""Messages and rounds: what every other package builds on."""

__version__ = "0.2.0"
