"""`python -m paellapy`: the command line, for use where its script is not on the path."""

from __future__ import annotations

from paellapy.cli import main

main()
