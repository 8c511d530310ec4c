"""``python -m alignmixup``: the same as the program ``alignmixup``."""

from __future__ import annotations

import sys

from alignmixup.cli import main

if __name__ == "__main__":
    sys.exit(main())
