"""Code that several methods share: exchanges, averages, the fusion step. Methods are the files next to this folder."""
