"""The report: one page of figures and tables from one or more run directories. This package does not import torch."""
