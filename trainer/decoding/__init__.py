"""Lossless speculative decoding: how a drafter is judged."""
