"""Steps that several methods share: what takes `fed` or `server`."""

from . import low_bit, screen, teaching  # noqa: F401  (the kinds of their slots, so that a configuration can name them)
