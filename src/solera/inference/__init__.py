"""Using trained models: predictions and export."""
