"""Make argv[1] empty files, then stay for argv[2] seconds and say so."""

import os
import sys
import time

os.mkdir("many")
for index in range(int(sys.argv[1])):
    os.close(os.open(f"many/{index}", os.O_CREAT | os.O_WRONLY))
time.sleep(float(sys.argv[2]))
print("stayed")
