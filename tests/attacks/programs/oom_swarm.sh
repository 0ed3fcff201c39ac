# Many processes, each smaller than init, none a preferred victim: together far above the memory limit.
echo 0 > /proc/self/oom_score_adj
for i in $(seq 1 60); do
  sh -c 'x=$(head -c 4000000 /dev/zero | tr "\0" x); sleep 6' &
done
for job in $(seq 1 60); do wait "%$job" || exit 1; done
echo reached
