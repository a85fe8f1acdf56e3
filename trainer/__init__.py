"""Everything that learns: drafters, losses, the loop, checkpoints, decoding, export."""

import os

STARTED_BY = os.getppid()  # read before anything heavy is imported: those seconds are enough for it to die
