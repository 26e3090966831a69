"""`python -m kdtree_engine` is the command `kdtree`."""

from .cli import main

main()
