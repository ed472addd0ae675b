"""`python -m fedcover`."""

from fedcover.cli import main

main()
