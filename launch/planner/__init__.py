"""What a run will take: memory, links, time, money, and what it will wait for. Arithmetic only: neither network nor GPU nor
the target's weights are needed."""
