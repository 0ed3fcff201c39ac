"""Files that some file systems, or programs, would take for one another: print the names, with their content."""

import os

NAMES = [
    b"a",
    b"A",
    "\u00e9".encode(),
    "e\u0301".encode(),
    b"\xff",
    b"\\xff",
    b"\\udcff",
    b"new\nline",
    b"-rf",
    b" ",
    b"~",
]
NAMES += [b"a.", b"a ", b"CON", b"x" * 255, "\u202etxt.exe".encode(), "\U0001f600".encode(), b"\x1b[2J", b"'\"$(id)"]
os.makedirs("/workspace/odd", exist_ok=True)
os.chdir(b"/workspace/odd")
for index, name in enumerate(NAMES):
    with open(name, "w") as file:
        file.write(str(index))
