"""The app of the Space; the package `ckpt_ft` lies beside this file."""

from ckpt_ft.cli.app import launch

if __name__ == "__main__":
    launch(host="0.0.0.0")
