"""A run under violence: `python -m tests.chaos --seed 1 --faults 40`, or `make chaos SEED=1`.

The same recipe runs twice, undisturbed and under random kills, hangs and corruptions of every process. The two must end
with the same weights, to the bit, and with every pack trained on exactly once.

    faults   what can be done to a run, and a seed's schedule of it
    victim   the run: its launcher, started again when it was ended; its processes by role
    wounds   the means: signals, cut connections, flipped bits, rogues and guests
    audit    what must be true afterwards
"""
