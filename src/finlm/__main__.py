"""`python -m finlm` is the command line."""

import sys

from finlm.cli.main import main

sys.exit(main())
