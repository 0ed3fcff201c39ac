"""Names that are each short enough, and together longer than any path that a program can give to the kernel."""

import os

here = os.open("/workspace", os.O_RDONLY)
for _ in range(25):
    os.mkdir("d" * 200, dir_fd=here)
    here = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
os.write(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here), b"deep")
