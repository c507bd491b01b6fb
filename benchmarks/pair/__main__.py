"""Train a target and a draft as the embedded ones were: python -m benchmarks.pair FOLDER

It takes about half an hour on two idle cores. Called again for the same folder, it resumes.
"""

import sys
from pathlib import Path

from benchmarks.pair.build import build
from benchmarks.pair.train import Recipe
from dyntree_plugin import openmp

if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    raise SystemExit(__doc__)
openmp.restart_with_library()
folder = Path(sys.argv[1])
build(folder, Recipe(), checkpoints=folder / "checkpoints")
