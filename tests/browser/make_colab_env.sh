#!/usr/bin/env bash
# Makes an environment with the notebook packages of Colab in 2026 and a JupyterLab that
# goes with them, for tests/browser: the widgets must work with ipywidgets 7 too.
#
#   tests/browser/make_colab_env.sh .venv-colab
#   LOWMEM_COLAB_PYTHON=$PWD/.venv-colab/bin/python pytest tests/browser
set -euo pipefail

target=${1:?usage: make_colab_env.sh DIRECTORY}
python=${PYTHON:-python3}

"$python" -m venv "$target"
"$target/bin/pip" install --quiet \
    ipywidgets==7.7.1 ipykernel==6.17.1 ipython==7.34.0 \
    'jupyterlab>=3.6,<4' 'jupyterlab-widgets<2' 'notebook<7' \
    torch numpy numba tqdm matplotlib
"$target/bin/python" -c 'import ipywidgets, torch; print("ipywidgets", ipywidgets.__version__)'
