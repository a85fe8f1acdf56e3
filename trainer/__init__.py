"""Everything that learns: drafters, losses, the loop, checkpoints, decoding, export."""
