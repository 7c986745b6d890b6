"""The program that Flower starts for each message at a site instead of its `flwr-clientapp`. It passes its arguments
to the process that has loaded everything (`standby.py`), and ends with it.

This file is copied into the site's state folder as a program. It imports nothing slow.
"""

import json
import os
import socket
import sys
import time

SOCKET = "standby.sock"  # beside the program
PATIENCE_S = 120.0  # timeout for the standby, which may be starting


def connect(folder: str) -> socket.socket:
    """A connection to the standby in `folder`. The path of a socket must be short, so it is relative."""
    os.chdir(folder)
    end = time.monotonic() + PATIENCE_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(SOCKET)
            return connection
        except OSError as e:
            connection.close()
            if time.monotonic() > end:
                sys.exit(f"solera: nothing answers at {folder}/{SOCKET}: {e}")
            time.sleep(0.1)


def main() -> int:
    """Hand over, and return the exit code of the process that did the work."""
    request = json.dumps({"argv": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
    with connect(os.path.dirname(os.path.abspath(sys.argv[0]))) as connection:
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(request)
        answer = connection.recv(1)
    return answer[0] if answer else 1


if __name__ == "__main__":
    sys.exit(main())
