"""`python -m inferry` is the `inferry` command."""

from inferry.cli.main import main

main()
