"""Exchange a file and a link out, and a directory and a link out, without rest, for argv[1] seconds."""

import ctypes
import os
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD, RENAME_EXCHANGE = -100, 2
os.makedirs("/workspace/out/place")
FILES = {"/home/agent/secret": "secret", "/workspace/out/file": "data", "/workspace/out/place/secret": "data"}
for name, text in FILES.items():
    with open(name, "w") as file:
        file.write(text)
os.symlink("/home/agent/secret", "/workspace/out/link")
os.symlink("/home/agent", "/workspace/out/way")
print("ready", flush=True)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    for one, other in ((b"file", b"link"), (b"place", b"way")):
        paths = b"/workspace/out/" + one, b"/workspace/out/" + other
        if libc.renameat2(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE):
            raise OSError(ctypes.get_errno(), "renameat2")
