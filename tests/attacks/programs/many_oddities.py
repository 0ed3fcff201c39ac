"""Things that cannot be exported, with long names in no encoding: the list of them is longer than any frame."""

import os

os.makedirs("/workspace/odd")
here = os.open("/workspace/odd", os.O_RDONLY)
for _ in range(8):
    os.mkdir(b"\xfe" * 250, dir_fd=here)
    here = os.open(b"\xfe" * 250, os.O_RDONLY, dir_fd=here)
for index in range(2000):
    os.mkfifo(b"\xff" * 240 + b"%04d" % index, dir_fd=here)
