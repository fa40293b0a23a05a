"""`python -m ckpt_ft.run` and `accelerate launch -q -m ckpt_ft.run`: what `ckpt-ft run` starts."""

from ckpt_ft.cli.run import main

if __name__ == "__main__":
    main()
