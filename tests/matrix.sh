#!/bin/sh
# Tests of units, patches and the cloud transport with the lowest and the highest versions that pyproject.toml
# declares, and with the NeMo-Run of NEMO_RUN_WHEEL, if it is set.
set -eu
uv="${BIN:?call this by: make matrix}/uv"

# An interpreter of that version: on PATH, of pyenv, or whatever uv finds or fetches.
interpreter() {
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        if "$candidate" -c '' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "$1"
}

# NEMO_RUN_WHEEL is a NeMo-Run that no registry has yet: its main, say. ROWS and TESTS choose
# some only, and WORKERS how many processes share them.
for row in ${ROWS:-3.10:lowest-direct 3.13:highest ${NEMO_RUN_WHEEL:+3.12:wheel}}; do
    python=${row%%:*} resolution=${row##*:}
    venv=.venv-$python-$resolution
    wheel=
    if [ "$resolution" = wheel ]; then
        resolution=highest wheel=$NEMO_RUN_WHEEL
    fi
    "$uv" venv --quiet --clear --python "$(interpreter "$python")" "$venv"
    "$uv" pip install --quiet --python "$venv/bin/python" --resolution "$resolution" \
        --editable '.[dev,examples]' ${wheel:+"$wheel"}
    echo "== $("$venv/bin/python" --version), $resolution versions"
    "$uv" pip list --python "$venv/bin/python" 2>/dev/null |
        grep -E '^(nemo-run|torchx|fiddle|ray|leptonai|httpx|websockets|filelock|typer|rich) '
    # Of tests/cloud those that need no job on DGX Cloud, which NeMo-Run 0.9 cannot start from here.
    cloud="tests/cloud/test_pod.py tests/cloud/test_source.py"
    # shellcheck disable=SC2086  # several words each
    "$venv/bin/python" -m pytest -n "${WORKERS:-2}" --no-loadscope-reorder \
        ${TESTS:-tests/unit tests/patches $cloud}
done
