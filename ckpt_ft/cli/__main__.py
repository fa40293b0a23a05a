"""`python -m ckpt_ft.cli` is `ckpt-ft`."""

from .main import main

main()
