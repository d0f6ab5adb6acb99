"""``python -m vescale`` is the ``vescale`` command."""

from vescale.cli import run_and_exit

if __name__ == "__main__":
    run_and_exit()
