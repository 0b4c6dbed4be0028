#!/usr/bin/env bash
# Builds .venv from requirements.lock with Python 3.12, or says what to install. Run through `make env`.
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
    local candidate
    for candidate in python3.12 python3 python; do
        # A version manager's shim can be on PATH and still refuse: only a run tells.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

python="$(find_python)"
if [ -z "$python" ]; then
    cat >&2 <<'MESSAGE'
make env: no Python 3.12 found (tried python3.12, python3 and python; Megatron-Core needs this version).
Install it, for example with one of
    apt-get install python3.12 python3.12-venv
    pyenv install 3.12        # .python-version in this folder then selects it
    conda create -n nvfp4 python=3.12 && conda activate nvfp4
and run the command again.
MESSAGE
    exit 2
fi

if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    echo "make env: $python has no venv module; install it (apt-get install python3.12-venv) and run the command again." >&2
    exit 2
fi

if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    echo "make env: building .venv with $("$python" --version); this downloads PyTorch once, several minutes"
    "$python" -m venv --clear .venv
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
touch .venv/.ready
echo "make env: .venv is ready; source .venv/bin/activate makes python the one in it"
