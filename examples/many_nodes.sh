#!/usr/bin/env bash
# Train one recipe on several nodes of a Slurm cluster:
#
#   sbatch --nodes 2 --gpus-per-node 8 --time 240 examples/many_nodes.sh RECIPE --out /shared/runs/NAME
#
# Two minutes before its time is over, and when it is preempted, the run saves, and the job is
# requeued and resumes; also with another number of nodes. PROCESSES per node default to its GPUs.
#SBATCH --ntasks-per-node=1 --requeue --open-mode=append --signal=B:USR1@120
set -u

trap 'is_stopped=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${PROCESSES:-auto}" \
  --rdzv-backend c10d --rdzv-endpoint "${ENDPOINT:-$first:29500}" --rdzv-id "$SLURM_JOB_ID" \
  --no-python alignmixup train "$@" &
wait $!
status=$?
while kill -0 $! 2> /dev/null; do # the trap ends a wait
  wait $!
  status=$?
done

# Within the grace time of a preemption, Slurm has sent SIGTERM to the processes alone.
if scontrol show job "$SLURM_JOB_ID" | grep -q "PreemptTime=[0-9]"; then is_stopped=1; fi
if [ "$status" -ne 0 ] && [ -n "${is_stopped:-}" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
