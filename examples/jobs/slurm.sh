#!/bin/bash
# A SLURM job on two nodes with four GPUs each: sbatch slurm.sh
#
# One task per node trains on all GPUs of its node. `srun` numbers the tasks, and Unisono reads the
# numbers. The job goes back into the queue and resumes:
#
# - after a node has failed, or a job of higher priority has taken the nodes (--requeue);
# - when its time is over. Two minutes before, SLURM sends SIGUSR1 to the tasks (--signal). They
#   save and leave with status 42, and this script puts the job back into the queue.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH --open-mode=append

# A secret of this job: without it, anyone who reaches the first node could join.
export UNISONO_JOB_TOKEN=$(openssl rand -hex 32)

# A folder that all nodes see.
srun python train.py --checkpoint "${SLURM_SUBMIT_DIR:-.}/checkpoints"
status=$?
if [ $status -eq 42 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
