"""`python -m autoplan` is the command `autoplan`."""

import sys

from .cli import main

sys.exit(main())
