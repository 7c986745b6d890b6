"""A federation on a real network: keys and certificates, a folder for the server and for each site, and the commands
that start them. What moves the messages is `engines.flower`; the programs on both ends are here."""
