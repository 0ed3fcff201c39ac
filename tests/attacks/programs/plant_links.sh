# Leave everything in /workspace that is not plain data. The secret lies where no export was declared.
set -e
echo secret > /home/agent/secret
mkdir -p /workspace/out
cd /workspace/out
echo data > plain
ln plain hard
ln -s /home/agent/secret link
ln -s /home/agent folder
mkfifo pipe
python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("socket")'
cp /bin/true program
chmod 6755 program
ln -s /home/agent /workspace/way
