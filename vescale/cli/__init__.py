"""The ``vescale`` command. Sub-commands live one to a file and register themselves in :data:`COMMANDS`."""

from vescale.cli._main import main, run_and_exit
