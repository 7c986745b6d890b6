"""The command line. It reads arguments and prints results; the library does the rest."""
