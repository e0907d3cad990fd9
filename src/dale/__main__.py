"""`python -m dale`: the command line, as `torchrun -m dale` starts it."""

import sys

from dale.cli import main

if __name__ == "__main__":
    sys.exit(main())
