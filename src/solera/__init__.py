"""Solera."""
