"""`python -m nobiru` is the `nobiru` command.

Light on purpose: a spawned rank process imports its parent's main module again.
"""

from __future__ import annotations

from nobiru.cli.main import main

if __name__ == "__main__":
    main()
