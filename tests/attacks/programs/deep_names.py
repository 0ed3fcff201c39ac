"""Directories deeper than an export goes, whose names are no UTF-8."""

import os

here = os.open("/workspace", os.O_RDONLY)
for _ in range(70):
    os.mkdir(b"\xff", dir_fd=here)
    here = os.open(b"\xff", os.O_RDONLY, dir_fd=here)
