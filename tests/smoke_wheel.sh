#!/bin/sh
# Build the source archive, the wheel from it, install the wheel in a clean environment and use it there.
#   sh tests/smoke_wheel.sh PYTHON CONSTRAINTS VENV
set -eu
python=$1 constraints=$2 venv=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The wheel is built from the source archive in a folder of its own, so nothing stale under build/ can slip in.
"$python" -m build --no-isolation --outdir "$work/dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
wheel=$(ls "$work"/dist/dpgrad-*.whl)

"$python" - "$wheel" <<'PY'
import pathlib, sys, zipfile

names = set(zipfile.ZipFile(sys.argv[1]).namelist())
tops = {name.split("/")[0] for name in names}
strangers = sorted(top for top in tops if top != "dpgrad" and not top.endswith(".dist-info"))
assert not strangers, f"the wheel installs more than dpgrad: {strangers}"
assert "dpgrad/py.typed" in names, "the wheel lacks dpgrad/py.typed"
assert any(name.endswith("/LICENSE") for name in names), "the wheel lacks the licence"
source = pathlib.Path("src")
files = {path.relative_to(source).as_posix() for path in (source / "dpgrad").rglob("*") if path.is_file()}
wanted = {name for name in files if "__pycache__" not in name and not name.endswith(".pyc")}
packaged = {name for name in names if name.startswith("dpgrad/")}
assert packaged == wanted, f"missing {sorted(wanted - packaged)}, stale {sorted(packaged - wanted)}"
PY

"$python" -m venv --clear "$venv"
venv=$(cd "$venv" && pwd)
"$venv/bin/python" -m pip --disable-pip-version-check --no-input install --quiet --no-compile -c "$constraints" "$wheel"

cd "$work" # away from the sources: only what was installed can answer
"$venv/bin/python" -I - <<'PY'
import dpgrad, pathlib, sysconfig

home, site = pathlib.Path(dpgrad.__file__).resolve(), pathlib.Path(sysconfig.get_path("purelib")).resolve()
assert site in home.parents, f"dpgrad was imported from {home}, not from the wheel"
PY
version=$("$venv/bin/dpgrad" --version)
case $version in
    *"$("$venv/bin/python" -I -c 'import dpgrad; print(dpgrad.__version__)')"*) ;;
    *) echo "dpgrad --version printed $version"; exit 1 ;;
esac
"$venv/bin/dpgrad" epsilon --sampling-rate 0.01 --noise-multiplier 4 --steps 10000 --delta 1e-5 --json >answer.json
"$venv/bin/python" -I - <<'PY'
import json, pathlib

answer = json.loads(pathlib.Path("answer.json").read_text())
assert 0.9468 < answer["epsilon"] < 0.948, f"epsilon must lie in (0.9468, 0.948), got {answer['epsilon']}"
assert answer["guarantee"] is True, answer
PY
# Without extras: what needs no optional library must not ask for one.
"$venv/bin/python" -I - <<'PY'
import dpgrad
from torch import nn

digits = dpgrad.data.load("digits").flat()
model = dpgrad.convex.DPLogisticRegression(epsilon=8, classes=range(10)).fit(digits.x_train, digits.y_train)
assert model.score(digits.x_test, digits.y_test) > 0.5, "the estimator learned nothing"
rows = digits.x_train, digits.y_train
fitted = dpgrad.fit(nn.Linear(64, 10), rows, epsilon=8, delta=1e-5, steps=2, batch_size=100, method="dpsgd")
assert 0 < fitted.guarantee.epsilon <= 8, fitted.guarantee
fitted.save("release")
PY
"$venv/bin/dpgrad" report release --out report.html >report.txt
echo "the wheel works: $version, epsilon as expected"
