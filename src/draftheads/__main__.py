"""``python -m draftheads``: the command line where no script is on the path."""

import sys

from draftheads.cli.main import main

sys.exit(main())
