"""A file of argv[1] bytes that takes no room."""

import os
import sys

with open("/workspace/sparse", "wb") as file:
    os.truncate(file.fileno(), int(sys.argv[1]))
