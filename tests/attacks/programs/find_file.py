"""Walk everything that can be read for a file named argv[1], and /proc of any kind for a process argument argv[2].

argv[3]: where the file is on the host, which is looked at below /host (all of a host is too much to walk).
"""

import glob
import os
import sys

for top in ("/", "/host" + sys.argv[3]):
    for folder, names, files in os.walk(top):
        if folder in ("/proc", "/sys", "/usr", "/host"):
            names.clear()
        if sys.argv[1] in files:
            with open(os.path.join(folder, sys.argv[1])) as file:
                print("file", file.read())
for name in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/host/proc/[0-9]*/cmdline"):
    try:
        with open(name, "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        continue
    if os.fsencode(sys.argv[2]) in words and b"find_file" not in b" ".join(words[:4]):
        print("process")
