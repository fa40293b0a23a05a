"""`python -m ckpt_ft.cli` is `ckpt-ft`."""

from .app import main

main()
