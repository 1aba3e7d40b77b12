"""`python -m hyperbloom.client` is `flower-client`."""

import sys

from hyperbloom.client.cli import main

sys.exit(main())
