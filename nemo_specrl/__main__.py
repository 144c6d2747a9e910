"""Run the command line as ``python -m nemo_specrl``."""

from nemo_specrl.cli.main import main

main()
