"""``python -m vescale`` is the ``vescale`` command."""

import sys

from vescale.cli import main

if __name__ == "__main__":
    sys.exit(main())
