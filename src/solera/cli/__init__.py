"""The command line. It reads arguments and prints results; what happens in between is the library's."""
