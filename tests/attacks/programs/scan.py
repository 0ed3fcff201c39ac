"""Look for listeners: argv[1] the first and argv[2] the last port on loopback, argv[3] an abstract socket's name."""

import socket
import sys

found = []
for port in range(int(sys.argv[1]), int(sys.argv[2]) + 1):
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family, socket.SOCK_STREAM) as client:
            client.settimeout(1)
            if client.connect_ex((address, port)) == 0:
                found.append(f"{address}:{port}")
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
    if client.connect_ex("\0" + sys.argv[3]) == 0:
        found.append("abstract")
interfaces = sorted(name for _, name in socket.if_nameindex())
print(" ".join(found), "|", " ".join(interfaces))
