"""`python -m diffattn`."""

import sys

from diffattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
