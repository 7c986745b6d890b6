"""Messages and rounds: what every other room rests on."""
