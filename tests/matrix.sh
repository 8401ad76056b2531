#!/bin/sh
# Unit tests with the lowest and the highest versions that pyproject.toml declares.
set -eu
uv="${BIN:?call this by: make matrix}/uv"
for row in 3.10:lowest-direct 3.13:highest; do
    python=${row%%:*} resolution=${row##*:}
    venv=.venv-$python-$resolution
    "$uv" venv --quiet --clear --python "$python" "$venv"
    "$uv" pip install --quiet --python "$venv/bin/python" --resolution "$resolution" \
        --editable '.[dev,examples]'
    echo "== Python $python, $resolution versions"
    "$uv" pip list --quiet --python "$venv/bin/python" 2>/dev/null |
        grep -E '^(nemo-run|torchx|fiddle|ray|leptonai|httpx|websockets|filelock|typer|rich) ' || true
    "$venv/bin/python" -m pytest tests/unit
done
