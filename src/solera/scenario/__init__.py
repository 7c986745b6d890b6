"""The clients and the server of a run, and the data and models that they bring."""
