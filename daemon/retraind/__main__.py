"""`python -m retraind`: the same as the `retraind` command."""

import sys

from retraind.cli import main

if __name__ == "__main__":
    sys.exit(main())
