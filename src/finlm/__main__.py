"""`python -m finlm` is the command line."""

import sys

from finlm.cli import main

sys.exit(main())
