#!/bin/bash
# A SLURM job on two nodes with four GPUs each: sbatch slurm.sh
#
# One task per node trains on all GPUs of its node. `srun` numbers the tasks, and Unisono reads the
# numbers. After a node has failed, SLURM puts the job back into the queue, and it resumes.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --requeue

# A secret of this job: without it, anyone who reaches the first node could join.
export UNISONO_JOB_TOKEN=$(openssl rand -hex 32)

# A folder that all nodes see.
srun python train.py --checkpoint "${SLURM_SUBMIT_DIR:-.}/checkpoint.pt"
