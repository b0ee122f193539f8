"""``python -m moe_core`` is the command line ``moe``."""

from __future__ import annotations

import sys

from moe_core.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
