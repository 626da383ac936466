"""`python -m inferry` is the `inferry` command."""

from inferry.cli import main

main()
