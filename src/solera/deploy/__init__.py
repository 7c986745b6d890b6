"""A federation on a real network: keys and certificates, a folder for the server and for each site, the engine that
moves the messages through Flower, and the programs on both ends. Everything that imports flwr is here."""
