#!/bin/bash
# Sends run 20261129-181258-dp4-3f2a by hand, as `isambard-serve submit` does.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

# SBATCH_* of this shell would override the scripts' directives; of SLURM_* only the way to Slurm is needed.
conf=${SLURM_CONF-}
unset "${!SBATCH_@}" "${!SLURM_@}"
[ -z "$conf" ] || export SLURM_CONF=$conf

serve=$(sbatch --parsable serve.sbatch)
serve=${serve%%;*}
echo "serve job $serve"
