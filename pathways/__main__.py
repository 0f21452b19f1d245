"""`python -m pathways`: the `pathways` command."""

from pathways.cli import main

main()
