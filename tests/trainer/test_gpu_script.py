"""`make gpu`, where there is no GPU: the script itself, on tiny shapes."""

from __future__ import annotations

import re

from tests.benchmarks import gpu


def test_every_8b_recipe_is_measured(capsys) -> None:
    assert gpu.main(["--device", "cpu", "--size", "tiny", "--steps", "1", "--skip-demo"]) == 0
    said = capsys.readouterr().out
    for recipe in gpu.TARGETS:
        rate, flops = re.search(rf"\| {recipe} \| [\d.]+ \| ([\d,]+) \| ([\d.]+) \|", said).groups()
        assert float(rate.replace(",", "")) > 0 and float(flops) > 0
