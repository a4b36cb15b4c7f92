#!/usr/bin/env bash
# Install the newest wheel of dist/ into a new environment and serve from it: wheel_test.sh PYTHON
# Runs outside the checkout, so that nothing but the installed wheel can be imported.
set -euo pipefail
python=${1:?usage: wheel_test.sh PYTHON}
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(ls -t "$root"/dist/*.whl | head -1)
venv=$root/build/wheel-venv
rm -rf "$venv"
"$python" -m venv --without-pip "$venv" # Debian may lack ensurepip; the pip of the checkout installs instead
echo "installing $(basename "$wheel") into $venv"
"$root/.venv/bin/python" -m pip --python "$venv/bin/python" install -q --progress-bar off -c "$root/constraints.txt" "${wheel}[demo]" 2>"$venv/pip-errors.log" \
  || { tail -n 20 "$venv/pip-errors.log" >&2; exit 1; }
cd "$(mktemp -d)"
"$venv/bin/python" -c 'import aspire_sglang.scheduler, aspire_sglang.attention_backends'
for name in scheduler attention_backends; do
  if "$venv/bin/python" -c "import $name" 2>/dev/null; then echo "the wheel installs a bare '$name'" >&2; exit 1; fi
done
"$venv/bin/aspire-sglang" demo --document "$root/examples/document.txt"
