#!/usr/bin/env bash
# Build the wheel and the sdist into dist/, check them, and take the README's first steps with each, in an environment
# that has nothing else and outside of the checkout. `make package` runs it.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD python=$PWD/.venv/bin/python
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
rm -rf dist
"$python" -m build --outdir dist .
"$python" -m twine check --strict dist/*
for built in dist/*.whl dist/*.tar.gz; do
    environment=$folder/${built##*.}
    "$python" -m venv "$environment"
    tools/setup.sh torch "$environment"
    "$environment/bin/python" -m pip install --quiet "$built"
    mkdir "$environment/work"
    cp examples/nanogpt/model.py "$environment/work"
    (cd "$environment/work" && env -u PYTHONPATH "$environment/bin/python" "$root/tools/first_steps.py")
    echo "package: $built is installed and works"
done
