"""The command line: `ckpt-ft`, or `python -m ckpt_ft.cli`."""
