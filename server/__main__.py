"""`python -m hyperbloom.server` is `flower-server`."""

import sys

from hyperbloom.server.cli import main

sys.exit(main())
