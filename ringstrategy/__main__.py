"""``python -m ringstrategy train.py``: see :mod:`ringstrategy.program`."""

import sys

from ringstrategy.program import main

if __name__ == "__main__":
    main(sys.argv[1:])
