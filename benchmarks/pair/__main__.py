"""Train models as the embedded ones were: python -m benchmarks.pair FOLDER

It trains what FOLDER lacks: a target and a draft, for half an hour on two idle cores, then a second
draft for the same target, for ten minutes, an EAGLE-3 head of it, for twenty-five, and a DFlash
draft, for fifteen. Called again for the same folder, it resumes.
"""

import sys
from pathlib import Path

from benchmarks.pair.build import build
from benchmarks.pair.second import add_second_draft
from benchmarks.pair.train import SECOND_DRAFT, Recipe
from benchmarks.pair.train_block import BlockRecipe, add_block
from benchmarks.pair.train_head import HeadRecipe, add_head
from dyntree_plugin import openmp, pair

if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    raise SystemExit(__doc__)
openmp.restart_with_library()
folder = Path(sys.argv[1])
checkpoints = folder / "checkpoints"
try:
    made = pair.paths(folder)
except FileNotFoundError:
    build(folder, Recipe(), checkpoints=checkpoints)
    made = pair.paths(folder)
if "second_draft" not in made:
    add_second_draft(folder, SECOND_DRAFT, checkpoints=checkpoints)
if "eagle3" not in made:
    add_head(folder, HeadRecipe(), checkpoints=checkpoints)
if "dflash" not in made:
    add_block(folder, BlockRecipe(), checkpoints=checkpoints)
