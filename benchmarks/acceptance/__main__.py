import sys

from benchmarks.acceptance.command import main
from dyntree_plugin import openmp

openmp.restart_with_library()
main(sys.argv[1:])
