"""Trained models: prediction and export."""
