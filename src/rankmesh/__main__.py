"""`python -m rankmesh`: owns nothing but this door to the command line."""

import sys

from rankmesh.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
