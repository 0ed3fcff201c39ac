"""Connect to each `host:port` of the words; print those that took the connection."""

import socket
import sys

for word in sys.argv[1:]:
    host, _, port = word.rpartition(":")
    with socket.socket() as end:
        end.settimeout(0.5)
        if end.connect_ex((host, int(port))) == 0:
            print(word, end=" ")
