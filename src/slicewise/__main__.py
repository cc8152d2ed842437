"""``python -m slicewise``: what the slicewise command does."""

import sys

from slicewise.cli import main

sys.exit(main())
