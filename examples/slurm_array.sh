#!/usr/bin/env bash
# One sweep on several machines under Slurm: every task of the array is a coordinator with the GPUs of its own node,
# and all of them share the study and the results folder. Tasks may start late, be pre-empted or be added later.
#
#   export REASONRL_STORAGE=postgresql://me@dbhost/sweeps      (password in ~/.pgpass)
#   export REASONRL_RESULTS=/shared/results                    (a folder every node sees)
#   sbatch --array=0-3 examples/slurm_array.sh +sweep=clip_ablation steps=200
#
#SBATCH --job-name=reasonrl
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%A_%a.log
set -euo pipefail

fail() { echo "slurm_array.sh: $*" >&2; exit 2; }

(($# > 0)) || fail "no sweep given. For instance: sbatch --array=0-3 $0 +sweep=clip_ablation"
[[ ${REASONRL_STORAGE:-} == postgres* ]] || fail "set REASONRL_STORAGE to a postgresql:// URL: tasks share their study."
[[ -n ${REASONRL_RESULTS:-} ]] || fail "set REASONRL_RESULTS to a folder that every node sees."
mkdir -p "$REASONRL_RESULTS" || fail "$REASONRL_RESULTS cannot be written to on $(hostname)."
# Slurm runs a copy of this script from its spool folder; the code is where sbatch was called.
cd "${REASONRL_CODE:-${SLURM_SUBMIT_DIR:-.}}"
[[ -f sweep.py ]] || fail "no sweep.py in $PWD. Call sbatch there, or set REASONRL_CODE."
python=${REASONRL_PYTHON:-.venv/bin/python}
[[ -x $python || -n $(command -v "$python") ]] || fail "no Python at $python. Set REASONRL_PYTHON."

"$python" sweep.py "$@" -m study.storage="$REASONRL_STORAGE" results="$REASONRL_RESULTS" &
sweep=$!
# Two minutes before the time limit, or at a pre-emption: runs write a checkpoint, other tasks take them over.
asked=
trap 'asked=1; kill -TERM "$sweep" 2>/dev/null' TERM INT
code=0
wait "$sweep" || code=$?
while kill -0 "$sweep" 2>/dev/null; do
    code=0
    wait "$sweep" || code=$?
done
if [[ -n $asked && $code == 130 && -n ${SLURM_JOB_ID:-} ]]; then
    scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}" || true
fi
exit "$code"
