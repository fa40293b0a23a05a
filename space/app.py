"""The app of the Space; the package `ckpt_ft` lies beside this file."""

from ckpt_ft.cli.app import app

if __name__ == "__main__":
    app(host="0.0.0.0", browser=False)
