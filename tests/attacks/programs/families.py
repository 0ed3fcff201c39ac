"""Which further socket families can be had; only the socket is made, nothing is connected."""

import socket

for family, kind in ((40, socket.SOCK_STREAM), (38, socket.SOCK_SEQPACKET)):
    try:
        socket.socket(family, kind).close()
    except OSError:
        continue
    print(family, end=" ")
