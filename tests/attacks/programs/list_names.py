"""Print each file of argv[1]: its name in hexadecimal, and its content."""

import os
import sys

os.chdir(sys.argv[1])
for name in sorted(os.listdir(b".")):
    with open(name) as file:
        print(f"{name.hex()}={file.read()}", end=" ")
