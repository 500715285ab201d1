#!/bin/bash
# Sends run 20261129-181258-dp4-3f2a by hand, as `isambard-serve submit` does: the serve job, then the sweep
# that depends on it.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

# SBATCH_* of this shell would override the scripts' directives; of SLURM_* only the way to Slurm is needed.
conf=${SLURM_CONF-}
unset "${!SBATCH_@}" "${!SLURM_@}"
[ -z "$conf" ] || export SLURM_CONF=$conf

serve=$(sbatch --parsable serve.sbatch)
serve=${serve%%;*}
# The sweep goes first when anything fails: cancelling the serve job would set it free to run.
trap 'scancel "$serve"; exit 1' ERR INT TERM
sweep=$(sbatch --parsable --dependency=after:"$serve"+10 sweep.sbatch)
sweep=${sweep%%;*}
trap 'scancel "$sweep"; scancel "$serve"; exit 1' ERR INT TERM
cp submitit/sweep.pkl "submitit/${sweep}_submitted.pkl"
echo "serve job $serve, sweep job $sweep"
