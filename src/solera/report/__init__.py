"""The report: one page of figures and tables from one or many run directories. Nothing here imports torch."""
