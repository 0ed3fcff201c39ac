"""Write argv[1] megabytes to each further directory in turn; print how many whole ones fitted."""

import os
import sys

for folder in sys.argv[2:]:
    name, done = os.path.join(folder, "filler"), 0
    try:
        with open(name, "wb", buffering=0) as file:
            for _ in range(int(sys.argv[1])):
                if file.write(bytes(1 << 20)) < 1 << 20:
                    break
                done += 1
    except OSError:
        pass
    if os.path.exists(name):
        os.unlink(name)
    print(done, end=" ")
