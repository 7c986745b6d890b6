"""What several methods share: exchanges, averages, the fusion step. A paper has a file beside this folder."""
