"""A tiny random model of every family of transformers that writes text, and what this project makes of it."""
