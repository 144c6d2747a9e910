"""``python -m nemo_specrl``: the command line."""

from nemo_specrl.cli import main

main()
