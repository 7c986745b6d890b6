"""The architectures that come with the package."""
